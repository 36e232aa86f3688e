-- Write messages: each into a stream of its tenant's hand, or delayed; repeated, it changes nothing.
-- includes: queue/_queue, queue/_records, queue/_bodies, queue/_limits, queue/_accounts, queue/_lanes, queue/_virtual, queue/_gates, queue/_openings, queue/_turns, queue/_line, queue/_moves, queue/_write
-- keys: meta, messages, waiting, ready, over, blocked, drained, accounts, limits, lanes, leases, delayed, dead, parked, ages, deadlines, uniques, windows, finished, takes, dwell, wakes, gates, openings, streams...
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
