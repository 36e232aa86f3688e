-- List tenants that have messages, a part of all at a time; writes nothing.
-- includes: queue/_limits
-- keys: queue/_keys
-- args: cursor, count:int
-- returns: {"tenants", cursor, {tenant, waiting, in_flight, state}, …} | {"lost"} | {"foreign", key}
--
-- As with HSCAN, cursor "0" is the first and the end, and a tenant may come twice.  Cost: O(count).

if is_lost() then
  return {"lost"}
end
local page = redis.call("HSCAN", accounts, cursor, "COUNT", count)
local reply = {"tenants", page[1]}
for i = 1, #page[2], 2 do
  local tenant, values = page[2][i], cmsgpack.unpack(page[2][i + 1])
  local in_flight, class, waits = values[2], values[7], values[11]
  if waits > 0 or in_flight > 0 then
    local state = has_limits and limits_of(tenant).paused and "paused" or ({r = "ready", o = "over", b = "blocked"})[class]
      or waits > 0 and "held" or "idle"
    reply[#reply + 1] = {tenant, waits, in_flight, state}
  end
end
return reply
