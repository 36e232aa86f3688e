-- Browse dead letters, oldest first; writes nothing.
-- includes: queue/_bodies
-- keys: queue/_keys
-- args: first:int, count:int
-- returns: {"dead", {id, tenant, key, attempts, since, died, reason, payload, headers}, …} | {"lost"} | {"foreign", key}
--
-- `first` is how many of the oldest to pass over.  Cost: O(count + log dead letters).

if is_lost() then
  return {"lost"}
end
local reply = {"dead"}
for _, member in ipairs(redis.call("ZRANGE", dead, first, first + count - 1)) do
  local id = parked_id(member)
  local payload, headers, reason, packed = read_parked(id)
  if payload then
    local record = unpack_record(packed)
    reply[#reply + 1] = {id, record.tenant, record.key, record.attempts, string.format("%.0f", record.since),
      string.format("%.0f", record.at), reason, payload, headers}
  end
end
return reply
