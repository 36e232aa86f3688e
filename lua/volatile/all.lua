-- Get all live fields.
-- includes: volatile/_fields
-- keys: fields, times
-- args: none...
-- returns: {"all", field, value, …} | {"foreign", key}
--
-- It writes nothing.  Cost: O(fields).

local STEP = 1000
local reply, found = {"all"}, redis.call("HGETALL", fields)
for from = 1, #found, 2 * STEP do
  local names = {}
  for i = from, math.min(from + 2 * STEP - 1, #found), 2 do
    names[#names + 1] = found[i]
  end
  local deadlines = read_deadlines(names)
  for i, name in ipairs(names) do
    if is_live(deadlines[name]) then
      reply[#reply + 1] = name
      reply[#reply + 1] = found[from + 2 * i - 1]
    end
  end
end
return reply
