-- Count the live fields.
-- includes: volatile/_fields
-- keys: fields, times
-- args: none...
-- returns: {"count", live} | {"foreign", key}
--
-- It writes nothing.  Cost: O(log fields) if `times` has all of them, else O(fields): the server's HLEN counts fields that are over.

local STEP = 1000
local size = redis.call("HLEN", fields)
if size > 0 and size == redis.call("ZCARD", times) then
  return {"count", redis.call("ZCOUNT", times, "(" .. as_score(now), "+inf")}
end
local live, found = 0, redis.call("HKEYS", fields)
for from = 1, #found, STEP do
  for _, deadline in pairs(read_deadlines({unpack(found, from, math.min(from + STEP - 1, #found))})) do
    live = live + (is_live(deadline) and 1 or 0)
  end
end
return {"count", live}
