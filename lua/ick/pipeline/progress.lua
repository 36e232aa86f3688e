-- Progress: the offset up to which every marked member has been processed.  Later marks would be lost with this Redis.
-- includes: ick/pipeline/_position
-- keys: version, dirty, reserved, position, progress, held
-- args: none...
-- returns: {"progress", done_up_to, marked_up_to, records, dirtied}
--
-- Each call may store a watermark: the current marked_up_to and the highest score that waits.  A member leaves only when
-- it is done, and its score only goes down.  Once every waiting score is higher than the watermark's, all members that
-- waited then are done, and so is everything up to its offset.  No clock is read, and scores need not follow the order of
-- offsets.  An invalid position is deleted, so that the publisher starts over.  Cost: O(log members).

if is_invalid then
  redis.call("DEL", position)
  redis.call("HDEL", progress, "passed", "offset", "score")
end
local fields = redis.call("HMGET", progress, "passed", "offset", "score", "records", "dirtied")
-- What is no number counts as missing: nothing has been processed then, as far as is known.
local done_up_to = tonumber(fields[1] or "") or 0
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

local before = done_up_to
if not lowest then
  done_up_to, offset = marked_up_to, nil
elseif offset and score and lowest > score then
  done_up_to = offset
end
done_up_to = math.min(done_up_to, marked_up_to)
if done_up_to ~= before then
  redis.call("HSET", progress, "passed", string.format("%.0f", done_up_to))
end
if not lowest then
  redis.call("HDEL", progress, "offset", "score")
elseif not (offset and score) or lowest > score then
  redis.call("HSET", progress, "offset", string.format("%.0f", marked_up_to), "score", text)
end
return {"progress", done_up_to, marked_up_to, tonumber(fields[4] or "") or 0, tonumber(fields[5] or "") or 0}
