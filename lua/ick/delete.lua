-- Delete the Ick and all its members: dirty, reserved and held.
-- includes: ick/_intact
-- keys: version, dirty, reserved, fence, held
-- args: unlink:int
-- returns: {"deleted", keys}   how many of the first three keys existed
--
-- With unlink = 1 a background thread of the server frees the memory.

local command = unlink == 1 and "UNLINK" or "DEL"
local keys = redis.call(command, version, dirty, reserved)
redis.call(command, fence, held)
return {"deleted", keys}
