-- Shared by the pipeline's scripts: the offset up to which a queue is written.
-- includes: queue/_queue
-- keys: position
-- The position is a stream of one entry, the last record that was written or passed over; its last field is `written`.  It is invalid
-- if the queue itself is missing, or if the stream has been appended to as a log; written_up_to is 0 then.

local LAST = 16
local written_up_to, newest, is_invalid = 0, nil, false
if redis.call("EXISTS", position) == 1 then
  local entries = redis.call("XREVRANGE", position, "+", "-", "COUNT", 2)
  newest = entries[1]
  is_invalid = not format or #entries ~= 1 or newest[2][LAST - 1] ~= "written"
  if not is_invalid then
    written_up_to = tonumber(string.match(newest[1], "^(%d+)"))
  end
end
