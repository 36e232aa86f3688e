-- Delete messages in whatever state they are; the holder of a lease finds it stale.
-- includes: queue/_moves, queue/_strike
-- keys: queue/_keys
-- args: tenant, ids...
-- returns: {"deleted", "waiting" | "leased" | "delayed" | "dead" | "unknown", …} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- Those of other tenants are unknown; "" is any tenant.  A unique name that one has for a time is free again, unless it is a dead letter.
-- Cost: O(messages × log messages).

local NAMES = {w = "waiting", l = "leased", d = "delayed", x = "dead"}
if is_lost() then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
begin_writing()

local function delete(id)
  local record = read_record(id)
  local name = record and NAMES[record.state]
  if not name or (tenant ~= "" and record.tenant ~= tenant) then
    return "unknown"
  end
  local account = tenant_account(record.tenant)
  if record.state == "w" then
    strike_out(account, id, record)
  elseif record.state == "l" then
    leave_flight(account, record)
    redis.call("ZREM", leases, id)
  end
  if record.state ~= "x" then
    forget(id, record)
    if record.scope == "window" and redis.call("HGET", uniques, record.unique) == id then
      redis.call("HDEL", uniques, record.unique)
      redis.call("ZREM", windows, record.unique)
    end
  end
  delete_entry(record)
  redis.call("ZREM", delayed, parked_member(id, record))
  redis.call("ZREM", dead, parked_member(id, record))
  redis.call("HDEL", parked, id)
  redis.call("HDEL", messages, id)
  mark_moved(account)
  return name
end

local reply = {"deleted"}
for i = ids, #ARGV do
  reply[#reply + 1] = delete(ARGV[i])
end
save_accounts()
save_queue()
wake()
return reply
