-- Commit, then reserve: members that are done leave the reserved set, the oldest dirty members fill it up.
-- includes: ick/_intact
-- keys: version, dirty, reserved
-- args: size:int, backwash:int, done...
-- returns: {"exchanged", committed, member, score, …}   at most `size` members, lowest score first
--
-- With size 0 it only commits; with no `done` it only reserves.  The reserved set is filled up to `size`.  A larger one
-- stays as it is, unless backwash = 1 first moves all of it back to the dirty set.  The reply is flat because some proxies
-- cannot pass on nested lists.  Cost: O((size + done) × log members); with backwash also the members that were reserved.

if not format then
  redis.call("SET", version, FORMAT)
end

local committed = in_slices(ARGV, done, function(...)
  return redis.call("ZREM", reserved, ...)
end)

if backwash == 1 then
  move_lowest(reserved, dirty, redis.call("ZCARD", reserved))
end

-- A member that is in both sets leaves the dirty set without enlarging the reserved one, hence the loop.
local room = size - redis.call("ZCARD", reserved)
while room > 0 and redis.call("EXISTS", dirty) == 1 do
  move_lowest(dirty, reserved, room)
  room = size - redis.call("ZCARD", reserved)
end

local answer = {"exchanged", committed}
if size > 0 then
  for _, value in ipairs(redis.call("ZRANGE", reserved, 0, size - 1, "WITHSCORES")) do
    answer[#answer + 1] = value
  end
end
return answer
