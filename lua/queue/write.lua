-- Write messages: each into a stream of its tenant's hand, or delayed; repeated, it changes nothing.
-- includes: queue/_write
-- keys: queue/_keys
-- args: wanted:int, items...
-- returns: {"written", result, …} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- What a message and a result are: see queue/_write.  Cost: O(messages × (hand + log messages)).

if is_lost(true) then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
begin_writing(true)
queue.streams = math.max(queue.streams, wanted)

return write_messages(items, {"written"})
