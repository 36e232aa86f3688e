-- Shared by the pipeline's scripts: the offset up to which an Ick is marked.
-- includes: ick/_intact
-- keys: version, position
-- The position is a stream of one entry, the last record that was marked; its last field is `marked`.  It is invalid if the
-- Ick itself is missing, or if the stream has been appended to as a log; marked_up_to is 0 then.

local LAST = 16
local marked_up_to, newest, is_invalid = 0, nil, false
local position_type = redis.call("TYPE", position).ok
if position_type ~= "none" and position_type ~= "stream" then
  return damaged(position, "stream", position_type)
end
if position_type == "stream" then
  local entries = redis.call("XREVRANGE", position, "+", "-", "COUNT", 2)
  newest = entries[1]
  is_invalid = not format or #entries ~= 1 or newest[2][LAST - 1] ~= "marked"
  if not is_invalid then
    marked_up_to = tonumber(string.match(newest[1], "^(%d+)"))
  end
end
