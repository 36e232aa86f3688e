-- Delete fields whose time is over, and samples of what has no deadline or no value.
-- includes: volatile/_fields
-- keys: fields, times
-- args: limit:int
-- returns: {"collected", over, damaged, held} | {"foreign", key}
--
-- A field loses its deadline if something else deletes `times`, evicts it, or writes the field by itself.
-- `held` is how many fields there were.  Cost: O(limit × log fields).

local SAMPLE = 5
local undated, missing, held = {}, {}, redis.call("HLEN", fields)
local sampled = redis.call("HRANDFIELD", fields, SAMPLE)
local deadlines = read_deadlines(sampled)
for _, name in ipairs(sampled) do
  if (deadlines[name] or 0) <= 0 then
    undated[#undated + 1] = name
  end
end
for _, name in ipairs(redis.call("ZRANDMEMBER", times, SAMPLE)) do
  if redis.call("HEXISTS", fields, name) == 0 then
    missing[#missing + 1] = name
  end
end

rehearse()
forget_lost_hash()
local over, damaged = reap(limit), 0
for _, name in ipairs(undated) do
  damaged = damaged + redis.call("HDEL", fields, name)
end
for _, name in ipairs(missing) do
  damaged = damaged + redis.call("ZREM", times, name)
end
return {"collected", over, damaged, held}
