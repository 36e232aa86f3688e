-- Delete a group of a shard, unless it has read within a time.
-- keys: seen, own...
-- args: group, idle:int
-- returns: {"dropped"} | {"used"}
--
-- `idle` is in milliseconds; 0 deletes it in any case.  Cost: O(pending + keys).

local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local at = tonumber(redis.call("ZSCORE", seen, group) or "")
if idle > 0 and (not at or now - at < idle) then
  return {"used"}
end
for i = own, #KEYS do
  redis.call("DEL", KEYS[i])
end
redis.call("ZREM", seen, group)
return {"dropped"}
