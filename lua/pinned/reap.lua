-- Delete pins whose time is over; samples are put back where `times` finds them.
-- includes: pinned/_pins
-- keys: pins, times, counter
-- args: limit:int
-- returns: {"reaped", over} | {"foreign", key}
--
-- A record is missing in `times` only if something else has deleted or evicted that key.  Cost: O(limit × log pins).

local SAMPLE = 5
local found = redis.call("HRANDFIELD", pins, SAMPLE)
rehearse()
for _, name in ipairs(found) do
  if not redis.call("ZSCORE", times, name) then
    redis.call("ZADD", times, deadline_in(redis.call("HGET", pins, name)), name)
  end
end
return {"reaped", reap(limit)}
