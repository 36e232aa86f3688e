-- Get all live fields.
-- includes: volatile/_fields
-- keys: fields, times
-- args: none...
-- returns: {"all", field, value, …} | {"foreign", key}
--
-- It writes nothing.  Cost: O(fields).

local STEP = 1000
local reply, known = {"all"}, {}
local scores = redis.call("ZRANGE", times, 0, -1, "WITHSCORES")
for i = 1, #scores, 2 do
  known[scores[i]] = tonumber(scores[i + 1])
end

local found, unknown = redis.call("HGETALL", fields), {}
for i = 1, #found, 2 do
  if not known[found[i]] then
    unknown[#unknown + 1] = found[i]
  end
end
for from = 1, #unknown, STEP do
  local to = math.min(from + STEP - 1, #unknown)
  for i, deadline in ipairs(native_deadlines({unpack(unknown, from, to)})) do
    known[unknown[from + i - 1]] = deadline
  end
end

for i = 1, #found, 2 do
  if (known[found[i]] or 0) > now then
    reply[#reply + 1] = found[i]
    reply[#reply + 1] = found[i + 1]
  end
end
return reply
