-- Pin a value; with a lock, only as its holder.
-- includes: pinned/_pins
-- keys: pins, times, counter
-- args: name, ttl:int, fresh:int, only_new:int, lock, token, value
-- returns: {"put"} | {"exists"} | {"lost"} | {"foreign", key}
--
-- `ttl` and `fresh` are in milliseconds: the value is there for `ttl`, and is fresh for `fresh`.  With `only_new`, one that is there stays.
-- `lock` and `token` are those of the lock, which is then released; empty: without one.  Lost: the lock is somebody else's or nobody's.
-- Two records that are over are deleted: without recruits the keys do not grow for ever.  Cost: O(log pins), and the value's length.

if lock ~= "" then
  local held = read_pin(lock)
  if not held or held.body ~= token then
    return {"lost"}
  end
end
if only_new == 1 and read_pin(name) then
  return {"exists"}
end
rehearse(true)
write_pin(name, deadline_after(ttl), deadline_after(fresh), value)
if lock ~= "" then
  delete_pin(lock)
end
reap(2)
return {"put"}
