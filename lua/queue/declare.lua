-- Declare the limits of tenants and keys: those of a pipeline, which hold where `limit` has set none; repeated, it changes nothing.
-- includes: queue/_queue, queue/_records, queue/_accounts, queue/_lanes, queue/_gates, queue/_openings, queue/_virtual, queue/_turns, queue/_line, queue/_moves
-- keys: meta, messages, waiting, ready, over, blocked, drained, accounts, limits, lanes, leases, delayed, dead, parked, ages, deadlines, uniques, windows, finished, takes, dwell, wakes, gates, openings, streams...
-- args: version, within, items...
-- returns: {"declared", is_new} | {"lost"} | {"foreign", key}
--
-- `version` stands for all of them, and "" for none; a tenant or a key is 3 arguments: "tenant" or "key", name, and text as in limit.lua.
-- Those declared before are replaced.  `within` is where keys are limited: "queue", "tenant", or "" for not at all; if it changes, the
-- next sweep rebuilds the queue, which counts what each key has in flight.  Cost: O(tenants with limits + blocked tenants) if it is new.

local VERSION = DECLARED .. DECLARED
if (redis.call("HGET", limits, VERSION) or "") == version then
  return {"declared", 0}
elseif is_lost(true) then
  return {"lost"}
end
begin_writing(true)
local was_within = gating and gating.within or ""
for _, name in ipairs(redis.call("HKEYS", limits)) do
  if string.sub(name, 1, 1) == DECLARED then
    redis.call("HDEL", limits, name)
  end
end
for from = items, #ARGV, 3 do
  local prefix = ARGV[from] == "key" and LIMITED or DECLARED
  redis.call("HSET", limits, prefix .. ARGV[from + 1], ARGV[from + 2])
end
if within ~= "" then
  redis.call("HSET", limits, WITHIN, within)
end
is_suspect = is_suspect or (format and within ~= was_within)
if version ~= "" then
  redis.call("HSET", limits, VERSION, version)
end
for _, key in ipairs({blocked, openings}) do
  redis.call("ZUNIONSTORE", key, 1, key, "WEIGHTS", 0)
end
save_queue()
wake()
return {"declared", 1}
