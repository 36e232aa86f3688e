-- Delete the Ick with all its members: dirty, reserved and held.
-- begins: ick/_whole
-- keys: version, dirty, reserved, fence, held
-- args: unlink:int
-- returns: {"deleted", keys}   how many of the first three keys there were
--
-- Unlink frees the memory in a thread of the server's.

local command = unlink == 1 and "UNLINK" or "DEL"
local keys = redis.call(command, version, dirty, reserved)
redis.call(command, fence, held)
return {"deleted", keys}
