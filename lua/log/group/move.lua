-- Move a group's cursor, or begin the group: what was pending from there on is forgotten, as it comes again.
-- includes: log/group/_group
-- keys: stream, newest_epoch, cursor, state, due, pending
-- args: to
-- returns: {"moved", next} | {"broken", found}
--
-- `to` is an offset, which may be one that does not exist yet, "first" or "last".  Cost: O(pending).

if tonumber(to) then
  place_cursor(math.max(1, tonumber(to)), "0")
  -- As after a plain SET: the log may end before it.
  redis.call("HDEL", state, "at")
else
  local found, fresh, broken = find_start(to)
  if broken then
    return broken
  end
  place_cursor(found, fresh)
end
local at = read_cursor()
forget_pending_from(at)
return {"moved", at}
