-- Commit, then reserve: members that are done leave the reserved set, the oldest dirty ones fill it up.
-- begins: ick/_whole
-- keys: version, dirty, reserved
-- args: size:int, backwash:int, done...
-- returns: {"exchanged", committed, member, score, …}   at most `size` members, lowest score first
--
-- With size 0 it only commits, with nothing done it only reserves.  The reserved set is filled up to `size`; one that
-- is larger already is left as it is, unless backwash first puts all of it back.  The reply is flat: some proxies
-- cannot pass on lists in lists.  Cost: O((size + done) × log members), and with backwash all that was reserved.

if not format then
  redis.call("SET", version, FORMAT)
end

local committed = sliced(ARGV, done, function(...)
  return redis.call("ZREM", reserved, ...)
end)

if backwash == 1 then
  fold(reserved, dirty, redis.call("ZCARD", reserved))
end

-- A member that is in both sets leaves the one without enlarging the other, hence again until full.
local room = size - redis.call("ZCARD", reserved)
while room > 0 and redis.call("EXISTS", dirty) == 1 do
  fold(dirty, reserved, room)
  room = size - redis.call("ZCARD", reserved)
end

local answer = {"exchanged", committed}
if size > 0 then
  for _, value in ipairs(redis.call("ZRANGE", reserved, 0, size - 1, "WITHSCORES")) do
    answer[#answer + 1] = value
  end
end
return answer
