-- A reservation ends: what is done leaves, the rest is dirty again, and anyone may reserve.
-- begins: ick/_whole, ick/fenced/_fence
-- keys: version, dirty, reserved, fence, held
-- args: number:int, request, all:int, done...
-- returns: {"released", committed, returned} | {"superseded", number, request, holder, pulse}
--
-- Called twice it finds the reservation ended: superseded, with an empty request.  Cost: O(held × log members).

if not stands(number, request) then
  return describe("superseded")
end
local committed = commit(all == 1, done)
local returned = redis.call("ZCARD", held)
if not format and returned > 0 then
  redis.call("SET", version, FORMAT)
end
fold(held, dirty, returned)
redis.call("HSET", fence, "request", "", "holder", "", "pulse", "0")
return {"released", committed, returned}
