-- The remaining time of fields.
-- includes: volatile/_fields
-- keys: fields, times
-- args: names...
-- returns: {"left", milliseconds, …} | {"foreign", key}
--
-- -1: it is for ever; -2: there is no such live field.  It writes nothing.  Cost: O(names × log fields).

local reply = {"left"}
for i = names, #ARGV do
  local left = -2
  if is_live(ARGV[i]) then
    local deadline = deadline_for(ARGV[i])
    left = deadline == math.huge and -1 or deadline - now
  end
  reply[#reply + 1] = left
end
return reply
