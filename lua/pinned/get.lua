-- Get pinned values.
-- includes: pinned/_pins
-- keys: pins, times, counter
-- args: names...
-- returns: {"pins", {value, left, fresh} | false, …} | {"foreign", key}
--
-- `left` and `fresh` are milliseconds: until the value is gone, and until it is not fresh (below 0: it is not).
-- It writes nothing.  Cost: O(names), and the values' length.

local reply = {"pins"}
for i = names, #ARGV do
  local pin = read_pin(ARGV[i])
  reply[#reply + 1] = pin and {pin.body, pin.deadline - now, pin.number - now} or false
end
return reply
