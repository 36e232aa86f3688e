-- Commit members of a reservation: they leave the held set, if the reservation is still the current one.
-- includes: ick/fenced/_fence
-- keys: version, dirty, reserved, fence, held
-- args: number:int, request, done...
-- returns: {"committed", members} | {"superseded", number, request, holder, heartbeats}
--
-- A member that became dirty since then is in the dirty set and stays there.  Safe to repeat: nothing is ever added to
-- what a reservation holds.  With no `done` the call is only a heartbeat.  Cost: O(done × log held).

if not is_current(number, request) then
  return describe("superseded")
end
local members = commit(false, done)
redis.call("HINCRBY", fence, "heartbeats", 1)
return {"committed", members}
