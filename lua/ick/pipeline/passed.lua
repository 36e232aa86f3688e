-- Up to which offset is everything done?  What is marked later than that would be lost with this Redis; the rest is not.
-- begins: ick/_whole, ick/pipeline/_position
-- keys: version, dirty, reserved, position, passage, held
-- args: none...
-- returns: {"passed", offset, told, records, dirtied}
--
-- Whoever asks leaves a mark: the offset told so far, and the highest score that waits.  A member leaves only when it is
-- done, and a score that it has only goes down.  So once all that waits has a higher score than the mark's, whatever
-- waited then has been done since, and the mark's offset is passed.  No clock is asked, and scores need not be in the
-- order of offsets.  A position that means nothing is deleted, so that the publisher begins anew.  Cost: O(log members).

if void then
  redis.call("DEL", position)
  redis.call("HDEL", passage, "passed", "offset", "score")
end
local fields = redis.call("HMGET", passage, "passed", "offset", "score", "records", "dirtied")
local passed = tonumber(fields[1] or "0")
local offset, score = tonumber(fields[2] or ""), tonumber(fields[3] or "")

local lowest, highest, text
for _, key in ipairs({dirty, reserved, held}) do
  local first = redis.call("ZRANGE", key, 0, 0, "WITHSCORES")[2]
  if first then
    local last = redis.call("ZREVRANGE", key, 0, 0, "WITHSCORES")[2]
    lowest = math.min(lowest or tonumber(first), tonumber(first))
    if not highest or tonumber(last) > highest then
      highest, text = tonumber(last), last
    end
  end
end

local before = passed
if not lowest then
  passed, offset = told, nil
elseif offset and lowest > score then
  passed = offset
end
passed = math.min(passed, told)
if passed ~= before then
  redis.call("HSET", passage, "passed", string.format("%.0f", passed))
end
if not lowest then
  redis.call("HDEL", passage, "offset", "score")
elseif not offset or lowest > score then
  redis.call("HSET", passage, "offset", string.format("%.0f", told), "score", text)
end
return {"passed", passed, told, tonumber(fields[4] or "0"), tonumber(fields[5] or "0")}
