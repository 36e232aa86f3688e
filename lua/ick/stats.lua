-- Number of dirty, reserved and held members, and their lowest and highest scores.  Writes nothing.
-- includes: ick/_intact
-- keys: version, dirty, reserved, fence, held
-- args: none...
-- returns: nil if there is no Ick | {"stats", format, dirty, reserved, held, extremes × 6, number, holder}
--
-- The six extremes are the lowest and highest score of the dirty, reserved and held members, as the text that Redis
-- writes, with all digits; empty for an empty set.

if not format then
  return false
end

local function score_at(key, place)
  return redis.call("ZRANGE", key, place, place, "WITHSCORES")[2] or ""
end

local has_fence = redis.call("TYPE", fence).ok == "hash"
local sets = {dirty, reserved}
if redis.call("TYPE", held).ok == "zset" then
  sets[3] = held
end
local answer = {"stats", format, 0, 0, 0, "", "", "", "", "", "", "0", ""}
for i, key in ipairs(sets) do
  answer[i + 2] = redis.call("ZCARD", key)
  answer[i * 2 + 4] = score_at(key, 0)
  answer[i * 2 + 5] = score_at(key, -1)
end
if has_fence then
  answer[12] = string.match(redis.call("HGET", fence, "number") or "", "^%d+$") or "0"
  answer[13] = redis.call("HGET", fence, "holder") or ""
end
return answer
