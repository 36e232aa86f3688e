-- Get fields: the value of each that is live.
-- includes: volatile/_fields
-- keys: fields, times
-- args: names...
-- returns: {"values", value | false, …} | {"foreign", key}
--
-- It writes nothing.  Cost: O(names × log fields).

local reply = {"values"}
for i = names, #ARGV do
  local value = redis.call("HGET", fields, ARGV[i])
  local is_over = not value or (deadline_for(ARGV[i]) or 0) <= now
  reply[#reply + 1] = not is_over and value
end
return reply
