-- Compare and mark: the Ick ends up the same, however often and by however many publishers a batch is sent.
-- includes: ick/pipeline/_position
-- keys: version, dirty, reserved, position, newest_epoch, progress
-- args: epoch:int, first:int, last:int, begins:int, id, key, at, marks...
-- returns: {"appended", tail, added} | {"behind", tail} | {"fenced", epoch} | {"foreign", offset, id} | {"broken", found}
--
-- A batch is the records from `first` to `last`, coalesced into one mark (score, member) for each member.  `id`, `key` and
-- `at` are the last record's.  `begins` is 1 if the journal begins at `first`, so that no earlier record will come.
-- A batch of which only the beginning is marked is not split: the reply says where to resume.  Marking again a member
-- that a consumer has done meanwhile would be harmless, but wasted work.  Cost: O(marks × log members).

local text = redis.call("GET", newest_epoch)
if text and not (#text < 11 and string.match(text, "^%d+$")) then
  return {"broken", "the key of its epoch holds no number"}
end
local epoch_held = tonumber(text or "0")
if epoch_held > epoch then
  return {"fenced", epoch_held}
end
if is_invalid then
  redis.call("DEL", position)
  redis.call("HDEL", progress, "passed", "offset", "score")
end

local function fence_off_older_epochs()
  if epoch_held < epoch then
    redis.call("SET", newest_epoch, string.format("%.0f", epoch))
  end
end

local added = 0
if marked_up_to >= last then
  if marked_up_to == last and (newest[2][2] ~= id or newest[2][14] ~= at) then
    return {"foreign", last, tostring(newest[2][2])}
  end
  fence_off_older_epochs()
elseif marked_up_to + 1 ~= first and (begins == 0 or marked_up_to >= first) then
  return {"behind", marked_up_to}
else
  -- Epoch and version first, so that no failure below leaves members without them.
  fence_off_older_epochs()
  redis.call("SETNX", version, FORMAT)
  local before = redis.call("ZCARD", dirty)
  in_slices(ARGV, marks, function(...) return redis.call("ZADD", dirty, "LT", "CH", ...) end)
  redis.call("XADD", position, "MAXLEN", "1", string.format("%.0f-0", last), "id", id, "key", key,
    "action", "dirty", "object", "member", "data", "null", "headers", "", "ts", at, "marked", "1")
  added = last - first + 1
  redis.call("HINCRBY", progress, "records", added)
  redis.call("HINCRBY", progress, "dirtied", redis.call("ZCARD", dirty) - before)
end

return {"appended", math.max(marked_up_to, last), added}
