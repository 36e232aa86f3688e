-- Give a live pin another time: a lock as its holder, a value as anybody.
-- includes: pinned/_pins
-- keys: pins, times, counter
-- args: name, token, ttl:int
-- returns: {"renewed"} | {"lost"} | {"foreign", key}
--
-- `ttl` is in milliseconds from now; `token` is that of the lock, and empty for a value.  Lost: it is over, or somebody else's.
-- Cost: O(log pins), and the value's length.

local pin = read_pin(name)
if not pin or (token ~= "" and pin.body ~= token) then
  return {"lost"}
end
rehearse(true)
write_pin(name, deadline_after(ttl), pin.number, pin.body)
return {"renewed"}
