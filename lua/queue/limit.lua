-- Limit a tenant, or by default all those that have no limits of their own; what waits already obeys.
-- includes: queue/_moves
-- keys: queue/_keys
-- args: tenant, text
-- returns: {"limited"} | {"lost"} | {"foreign", key}
--
-- `text` is seven numbers, "-" for none: weight, elastic limit, limit in flight, messages a second, burst, bytes, paused; "" takes the
-- tenant's own limits away.  The default is that of the tenant "".  Blocked tenants are placed again by the next take.
-- Cost: O(log tenants), or O(blocked tenants) for the default; where keys are limited and it was paused, O(keys at a limit) as well.

if is_lost() then
  return {"lost"}
end
begin_writing()
local was_paused = gating and limits_of(tenant).paused
if text == "" then
  redis.call("HDEL", limits, tenant)
else
  redis.call("HSET", limits, tenant, text)
end
if was_paused then
  redis.call("ZUNIONSTORE", openings, 1, openings, "WEIGHTS", 0)
end
if tenant ~= "" then
  place(tenant_account(tenant))
else
  redis.call("ZUNIONSTORE", blocked, 1, blocked, "WEIGHTS", 0)
end
save_accounts()
save_queue()
wake()
return {"limited"}
