-- Appends records to a log without a pipeline, at the next offsets; evicts the oldest ones.
-- includes: log/_extent, log/_add
-- keys: stream, newest_epoch, writes
-- args: mark, token, count:int, keep:int, plain:int, values...
-- returns: {"written", first, last} | {"owned", epoch} | {"broken", found}
--
-- `mark` becomes the epoch of a log that does not exist yet: no streamer takes such a log for its own, because it is no
-- number.  A log whose epoch is a number, or that has none, belongs to a streamer or to something else.
-- `token` names this call: one that is repeated appends nothing, and has the same reply.  `writes` holds the tokens of the
-- last calls, each with its last offset.
-- At least `keep` records are kept; all of them if it is less than 0.
-- The values: codec and seven columns of a batch; or, with `plain`, key, action, object, data and headers of each record.
-- The id of a record is its offset; it is staged now, by the server's clock.
-- Cost: O(bytes + entries evicted).

local MAX_TOKENS = 1000

if damage then
  return {"broken", damage}
elseif string.sub(epoch, 1, 7) ~= "writer " and not (epoch == "0" and tail == 0) then
  return {"owned", epoch}
end

local newest = redis.call("ZREVRANGE", writes, 0, 0, "WITHSCORES")
if newest[2] and tonumber(newest[2]) > tail then
  redis.call("DEL", writes)  -- the log was deleted, and these calls with it
end
local known = redis.call("ZSCORE", writes, token)
if known then
  return {"written", known - count + 1, tonumber(known)}
end

if epoch == "0" then
  redis.call("SET", newest_epoch, mark)
end
local begin, last = tail + 1, tail + count
local time = redis.call("TIME")
local staged_us = string.format("%s%06d", time[1], time[2])
redis.call("ZADD", writes, string.format("%.0f", last), token)

local failed
if plain == 0 then
  local from, to = string.format("%.0f %s", begin, staged_us), string.format("%.0f %s", last, staged_us)
  failed = add_batch(begin, last, from, to, values)
else
  for offset = begin, last do
    local at = values + (offset - begin) * 5
    failed = failed or add(offset,
      "id", string.format("%.0f", offset), "key", ARGV[at], "action", ARGV[at + 1], "object", ARGV[at + 2],
      "data", ARGV[at + 3], "headers", ARGV[at + 4], "ts", staged_us)
  end
end
if failed then
  redis.call("ZREM", writes, token)
  return failed
end

if keep >= 0 then
  redis.call("XTRIM", stream, "MINID", id_of(math.max(1, last - keep + 1)))
end
redis.call("ZREMRANGEBYRANK", writes, 0, -MAX_TOKENS - 1)
return {"written", begin, last}
