-- Count the messages that each reader has, a part of all; writes nothing.
-- includes: queue/_bodies
-- keys: queue/_keys
-- args: count:int
-- returns: {"holders", is_all, reader, messages, …} | {"lost"} | {"foreign", key}
--
-- Those whose leases end first are counted, `count` at most.  Cost: O(count).

if is_lost() then
  return {"lost"}
end
local ids, counts = redis.call("ZRANGE", leases, 0, count - 1), {}
begin_batch(ids)
for _, id in ipairs(ids) do
  local record = read_record(id)
  local holder = record and record.state == "l" and string.match(record.token, "^(.*)/%d+/%d+$")
  if holder then
    counts[holder] = (counts[holder] or 0) + 1
  end
end
local reply = {"holders", redis.call("ZCARD", leases) <= count and 1 or 0}
for holder, messages in pairs(counts) do
  reply[#reply + 1] = holder
  reply[#reply + 1] = messages
end
return reply
