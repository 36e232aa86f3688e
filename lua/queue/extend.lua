-- Extend leases: each is to last `lease` milliseconds from now.
-- includes: queue/_queue, queue/_records
-- keys: queue/_keys
-- args: lease:int, items...
-- returns: {"extended", "ok" | "stale", …} | {"foreign", key}
--
-- A lease is 2 arguments: id, token.  Stale: as in settle.lua.  Cost: O(leases × log messages).

-- A write that changes nothing: see begin_writing.
redis.call("ZREMRANGEBYRANK", leases, 1, 0)
local reply = {"extended"}
for from = items, #ARGV, 2 do
  local id, token = ARGV[from], ARGV[from + 1]
  local record = read_record(id)
  local is_held = record and record.token == token
  if is_held then
    redis.call("ZADD", leases, now + lease, id)
  end
  reply[#reply + 1] = is_held and "ok" or "stale"
end
return reply
