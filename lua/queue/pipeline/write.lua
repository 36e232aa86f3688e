-- Compare and write: the queue ends up the same, however often and by however many publishers a batch is sent.
-- includes: queue/_write, queue/_declared, queue/pipeline/_position
-- keys: position, newest_epoch, queue/_keys
-- args: declared, epoch:int, first:int, last:int, begins:int, id, at, wanted:int, items...
-- returns: {"appended", tail, added, is_new, result, …} | {"behind", tail} | {"fenced", epoch} | {"other", offset, id} | {"broken", found}
--   | {"damaged"} | {"undeclared"} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- A batch is the records from `first` to `last`; those that are done, or that wait in Postgres, have no message in it.  `id` and `at` are
-- the last record's; `at` is 0 if it is done.  `begins` is 1 if the journal begins at `first`, so that no earlier record will come.
-- With last = 0 the messages are written wherever the position is: they were passed over before.  is_new is 1 if the position was not
-- there: whatever was written to this queue before is lost.  What a message and a result are: see queue/_write.
-- Cost: O(messages × (hand + log messages)).

local text = redis.call("GET", newest_epoch)
if text and not (#text < 11 and string.match(text, "^%d+$")) then
  return {"broken", "the key of its epoch holds no number"}
end
local epoch_held = number(text)
if epoch_held > epoch then
  return {"fenced", epoch_held}
end
-- Before a rebuild, which makes the queue's state again: it cannot tell what the position stood for.
if is_invalid then
  redis.call("DEL", position)
end
if is_undeclared() then
  return {"undeclared"}
elseif is_lost(true) then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
if last > 0 and written_up_to == last then
  local has_time = at ~= "0" and newest[2][14] ~= "0"
  if newest[2][2] ~= id or (has_time and newest[2][14] ~= at) then
    return {"other", last, tostring(newest[2][2])}
  end
elseif last > 0 and written_up_to < last and written_up_to + 1 ~= first and (begins == 0 or written_up_to >= first) then
  return {"behind", written_up_to}
end

-- The epoch first, so that no failure below leaves messages that an older publisher would not see.
if epoch_held < epoch then
  redis.call("SET", newest_epoch, string.format("%.0f", epoch))
end
if last > 0 and written_up_to >= last then
  return {"appended", written_up_to, 0, 0}
end
begin_writing(true)
queue.streams = math.max(queue.streams, wanted)
local reply = write_messages(items, {"appended", last, 0, newest and not is_invalid and 0 or 1}, true)
for i = 5, #reply do
  -- The position stays: the batch comes again when the streams are repaired, and what was written is known then.
  if reply[i] == "damaged" then
    return {"damaged"}
  end
end
if last > 0 then
  redis.call("XADD", position, "MAXLEN", "1", string.format("%.0f-0", last), "id", id, "key", "-", "action", "queued",
    "object", "message", "data", "null", "headers", "", "ts", at, "written", "1")
  reply[3] = last - math.max(first, written_up_to + 1) + 1
end
return reply
