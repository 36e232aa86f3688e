-- The groups of a shard that have not read for a while.
-- keys: seen
-- args: idle:int
-- returns: {"idle", group, …}
--
-- `idle` is in milliseconds.  Cost: O(groups).

local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
return {"idle", unpack(redis.call("ZRANGEBYSCORE", seen, "-inf", string.format("%.0f", now - idle), "LIMIT", 0, 1000))}
