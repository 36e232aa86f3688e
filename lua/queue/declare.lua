-- Declare the limits of tenants: those of a pipeline, which hold where `limit` has set none; repeated, it changes nothing.
-- includes: queue/_queue, queue/_records, queue/_accounts, queue/_virtual, queue/_turns, queue/_line, queue/_moves
-- keys: meta, messages, waiting, ready, over, blocked, drained, accounts, limits, lanes, leases, delayed, dead, parked, ages, deadlines, uniques, windows, finished, takes, dwell, wakes, streams...
-- args: version, items...
-- returns: {"declared", is_new} | {"lost"} | {"foreign", key}
--
-- `version` stands for all of them, and "" for none; a tenant is 2 arguments: name, and text as in limit.lua.  Those declared before are
-- replaced.  Cost: O(tenants with limits + blocked tenants) if it is new.

local VERSION = DECLARED .. DECLARED
if (redis.call("HGET", limits, VERSION) or "") == version then
  return {"declared", 0}
elseif is_lost(true) then
  return {"lost"}
end
begin_writing(true)
for _, name in ipairs(redis.call("HKEYS", limits)) do
  if string.sub(name, 1, 1) == DECLARED then
    redis.call("HDEL", limits, name)
  end
end
for from = items, #ARGV, 2 do
  redis.call("HSET", limits, DECLARED .. ARGV[from], ARGV[from + 1])
end
if version ~= "" then
  redis.call("HSET", limits, VERSION, version)
end
redis.call("ZUNIONSTORE", blocked, 1, blocked, "WEIGHTS", 0)
save_queue()
wake()
return {"declared", 1}
