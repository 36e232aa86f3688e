-- Compare and mark: members are marked once for each record, however often, and by whomever, a batch is sent.
-- begins: ick/_whole, ick/pipeline/_position
-- keys: version, dirty, reserved, position, newest_epoch, passage
-- args: epoch:int, first:int, last:int, begins:int, id, key, at, marks...
-- returns: {"appended", tail, added} | {"behind", tail} | {"fenced", epoch} | {"foreign", offset, id}
--
-- A batch is the records from `first` to `last`, folded: a mark (score, member) for each member in it.  `id`, `key` and
-- `at` are the last record's.  `begins` is 1 where the journal begins at `first`, so that nothing before it will come.
-- A batch that overlaps with what was told is not taken apart: the answer says from where to send.  To mark a member
-- again that a consumer has done in between would be harmless, but work for nothing.  Cost: O(marks × log members).

local epoch_held = tonumber(redis.call("GET", newest_epoch) or epoch)
if epoch_held > epoch then
  return {"fenced", epoch_held}
end
if void then
  redis.call("DEL", position)
end

local added = 0
if told >= last then
  if told == last and (newest[2][2] ~= id or newest[2][14] ~= at) then
    return {"foreign", last, tostring(newest[2][2])}
  end
elseif told + 1 ~= first and (begins == 0 or told >= first) then
  return {"behind", told}
else
  -- The version first, so that nothing after it can leave members without one.
  redis.call("SETNX", version, FORMAT)
  local before = redis.call("ZCARD", dirty)
  sliced(ARGV, marks, function(...) return redis.call("ZADD", dirty, "LT", "CH", ...) end)
  redis.call("XADD", position, "MAXLEN", "1", string.format("%.0f-0", last), "id", id, "key", key,
    "action", "dirty", "object", "member", "data", "null", "headers", "", "ts", at, "marked", "1")
  added = last - math.max(first, told + 1) + 1
  redis.call("HINCRBY", passage, "records", added)
  redis.call("HINCRBY", passage, "dirtied", redis.call("ZCARD", dirty) - before)
end

if epoch_held < epoch or added > 0 then
  redis.call("SET", newest_epoch, string.format("%.0f", epoch))
end
return {"appended", math.max(told, last), added}
