-- End a reservation: members that are done leave, the rest become dirty again, and any consumer may reserve.
-- includes: ick/fenced/_fence
-- keys: version, dirty, reserved, fence, held
-- args: number:int, request, all:int, done...
-- returns: {"released", committed, returned} | {"superseded", number, request, holder, heartbeats}
--
-- A second call returns "superseded" with an empty request.  Cost: O(held × log members).

if not is_current(number, request) then
  return describe("superseded")
end
local committed = commit(all == 1, done)
local returned = redis.call("ZCARD", held)
if not format and returned > 0 then
  redis.call("SET", version, FORMAT)
end
move_lowest(held, dirty, returned)
redis.call("HSET", fence, "request", "", "holder", "", "heartbeats", "0")
return {"released", committed, returned}
