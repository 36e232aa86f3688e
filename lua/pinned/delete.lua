-- Delete a pin: a lock as its holder (compare and delete), a value as anybody.
-- includes: pinned/_pins
-- keys: pins, times, counter
-- args: name, token
-- returns: {"deleted"} | {"lost"} | {"foreign", key}
--
-- `token` is that of the lock, and empty for a value.  Lost: it is over, or somebody else's; nothing has changed.  Cost: O(log pins).

local pin = read_pin(name)
if not pin or (token ~= "" and pin.body ~= token) then
  return {"lost"}
end
rehearse()
delete_pin(name)
return {"deleted"}
