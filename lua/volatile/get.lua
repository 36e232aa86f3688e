-- Get fields: the value of each that is live.
-- includes: volatile/_fields
-- keys: fields, times
-- args: names...
-- returns: {"values", value | false, …} | {"foreign", key}
--
-- It writes nothing.  Cost: O(names × log fields).

local reply, found, asked = {"values"}, {}, {}
for i = names, #ARGV do
  local value = redis.call("HGET", fields, ARGV[i])
  if value then
    found[ARGV[i]] = value
    asked[#asked + 1] = ARGV[i]
  end
end
local deadlines = read_deadlines(asked)
for i = names, #ARGV do
  reply[#reply + 1] = is_live(deadlines[ARGV[i]]) and found[ARGV[i]] or false
end
return reply
