-- Members of a reservation are done: they leave the held set, if the reservation still stands.
-- begins: ick/_whole, ick/fenced/_fence
-- keys: version, dirty, reserved, fence, held
-- args: number:int, request, done...
-- returns: {"committed", members} | {"superseded", number, request, holder, pulse}
--
-- A member that became dirty since is in the dirty set, and stays there.  Safe to repeat: nothing is ever added to
-- what a reservation holds.  With nothing done it is a sign of life.  Cost: O(done × log held).

if not stands(number, request) then
  return describe("superseded")
end
local members = commit(false, done)
redis.call("HINCRBY", fence, "pulse", 1)
return {"committed", members}
