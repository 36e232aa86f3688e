-- The remaining time of fields.
-- includes: volatile/_fields
-- keys: fields, times
-- args: names...
-- returns: {"left", milliseconds, …} | {"foreign", key}
--
-- -1: it is for ever; -2: there is no such live field.  It writes nothing.  Cost: O(names × log fields).

local reply, deadlines = {"left"}, read_deadlines(existing({unpack(ARGV, names)}))
for i = names, #ARGV do
  local deadline = deadlines[ARGV[i]]
  if not is_live(deadline) then
    reply[#reply + 1] = -2
  else
    reply[#reply + 1] = deadline == math.huge and -1 or deadline - now
  end
end
return reply
