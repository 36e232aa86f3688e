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
  local body = redis.call("HGET", parked, id)
  if body then
    local values = cmsgpack.unpack(body)
    local record = unpack_record(values[4])
    reply[#reply + 1] = {id, record.tenant, record.key, record.attempts, string.format("%.0f", record.since),
      string.format("%.0f", record.at), values[3], values[1], values[2]}
  end
end
return reply
