-- List tenants that have messages, a part of all at a time; writes nothing.
-- includes: queue/_accounts
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
  local account = unpack_account(page[2][i], page[2][i + 1])
  if account.waits > 0 or account.in_flight > 0 then
    local state = account.limits.paused and "paused" or ({r = "ready", o = "over", b = "blocked"})[account.class]
      or account.waits > 0 and "held" or "idle"
    reply[#reply + 1] = {account.tenant, account.waits, account.in_flight, state}
  end
end
return reply
