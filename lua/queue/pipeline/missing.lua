-- Missing: which of these records the queue does not have.  Their effects are outstanding: they are to be written again.
-- includes: queue/pipeline/_position
-- keys: position, queue/_keys
-- args: ids...
-- returns: {"missing", written_up_to, id, …} | {"lost"} | {"foreign", key}
--
-- An invalid position is deleted, so that the publisher starts over.  Cost: O(ids).

-- Before a rebuild, which makes the queue's state again: it cannot tell what the position stood for.
if is_invalid then
  redis.call("DEL", position)
end
if is_lost() then
  return {"lost"}
end
local reply = {"missing", written_up_to}
for i = ids, #ARGV do
  if redis.call("HEXISTS", messages, ARGV[i]) == 0 then
    reply[#reply + 1] = ARGV[i]
  end
end
return reply
