-- Mark members dirty: each keeps the lowest score that it was ever given, the time when it first became dirty.
-- begins: ick/_whole
-- keys: version, dirty, reserved
-- args: marks...
-- returns: {"added", new, lowered}
--
-- A mark is two arguments, score and member, taken in their order.  Only the dirty set is looked at: a member that is
-- reserved becomes dirty anew.  Calling twice changes nothing.  Cost: O(marks × log members).

-- First, so that nothing after it can leave members without a version.
redis.call("SETNX", version, FORMAT)

local before = redis.call("ZCARD", dirty)
local touched = sliced(ARGV, marks, function(...)
  return redis.call("ZADD", dirty, "LT", "CH", ...)
end)
local new = redis.call("ZCARD", dirty) - before
return {"added", new, touched - new}
