-- Add a slice of the walk, and move to its end.
-- includes: tracker/_ids
-- keys: tracked, position, checks
-- args: before, after, ids...
-- returns: {"added", new} | {"moved"} | {"foreign", key}
--
-- `before` and `after` are positions, ids of the table's key; empty: its beginning.  Moved: somebody else has walked on from `before`,
-- and nothing has changed.  The ids come first: if the position is refused, the slice is walked again.  Cost: O(ids).

if (redis.call("GET", position) or "") ~= before then
  return {"moved"}
end
local new = add(ids)
redis.call("SET", position, after)
return {"added", new}
