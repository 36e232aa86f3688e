-- Count the live fields.
-- includes: volatile/_fields
-- keys: fields, times
-- args: none...
-- returns: {"count", live} | {"foreign", key}
--
-- It writes nothing.  Cost: O(log fields) if `times` has all of them, else O(fields): the server's HLEN counts fields that are over.

local STEP = 1000
local size = redis.call("HLEN", fields)
if size == 0 then
  return {"count", 0}
elseif size == redis.call("ZCARD", times) then
  return {"count", redis.call("ZCOUNT", times, "(" .. as_score(now), "+inf")}
end

local known, live = {}, 0
local scores = redis.call("ZRANGE", times, 0, -1, "WITHSCORES")
for i = 1, #scores, 2 do
  known[scores[i]] = tonumber(scores[i + 1])
end
local unknown = {}
for _, name in ipairs(redis.call("HKEYS", fields)) do
  if not known[name] then
    unknown[#unknown + 1] = name
  elseif known[name] > now then
    live = live + 1
  end
end
for from = 1, #unknown, STEP do
  for _, deadline in ipairs(native_deadlines({unpack(unknown, from, math.min(from + STEP - 1, #unknown))})) do
    if deadline > now then
      live = live + 1
    end
  end
end
return {"count", live}
