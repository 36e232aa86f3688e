-- Confirm leases: whether each is still held; writes nothing.
-- includes: queue/_records
-- keys: messages
-- args: items...
-- returns: {"ok" | "stale", …}
--
-- A lease is 2 arguments: id, token.  Stale: as in settle.lua.  Cost: O(leases).

local reply, ids = {}, {}
for from = items, #ARGV, 2 do
  ids[#ids + 1] = ARGV[from]
end
begin_batch(ids)
for from = items, #ARGV, 2 do
  local record = read_record(ARGV[from])
  reply[#reply + 1] = record and record.token == ARGV[from + 1] and "ok" or "stale"
end
return reply
