-- Mark members dirty: each keeps the lowest score it was given, the time when it first became dirty.
-- includes: ick/_intact
-- keys: version, dirty, reserved
-- args: marks...
-- returns: {"added", new, lowered}
--
-- A mark is two arguments, score and member; marks apply in order.  Only the dirty set is checked, so a reserved member
-- becomes dirty again.  A second call changes nothing.  Cost: O(marks × log members).

-- First, so that no failure below leaves members without a version.
redis.call("SETNX", version, FORMAT)

local before = redis.call("ZCARD", dirty)
local touched = in_slices(ARGV, marks, function(...)
  return redis.call("ZADD", dirty, "LT", "CH", ...)
end)
local new = redis.call("ZCARD", dirty) - before
return {"added", new, touched - new}
