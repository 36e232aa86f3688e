-- Add ids that have queued work.
-- includes: tracker/_ids
-- keys: tracked, position, checks
-- args: ids...
-- returns: {"added", new} | {"foreign", key}
--
-- Cost: O(ids).

return {"added", add(ids)}
