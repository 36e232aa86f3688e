-- A part of the pipeline's scripts: up to which offset has an Ick been told?  Follows ick/_whole.
-- keys: version, position
-- The position is a stream of one entry, the last record that was marked, with the field `marked` at its end.  Without
-- the Ick itself it means nothing, and neither does a stream that somebody has appended to as to a log: told is 0 then.

local LAST = 16
local told, newest, void = 0, nil, false
local position_type = redis.call("TYPE", position).ok
if position_type ~= "none" and position_type ~= "stream" then
  return damaged(position, "stream", position_type)
end
if position_type == "stream" then
  local entries = redis.call("XREVRANGE", position, "+", "-", "COUNT", 2)
  newest = entries[1]
  void = not format or #entries ~= 1 or newest[2][LAST - 1] ~= "marked"
  if not void then
    told = tonumber(string.match(newest[1], "^(%d+)"))
  end
end
