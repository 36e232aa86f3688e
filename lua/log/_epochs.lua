-- Shared by the scripts that read: whether the log has other records where the caller has read.
-- includes: log/_extent
-- keys: ends
-- args: seen:int, seen_epoch
--
-- `ends` holds, for each epoch that began with other records than the log had, the last offset before them.  An epoch without
-- one has changed nothing.  A writer's mark is the epoch of one log: with another one, it is another log.

local is_other = false
if seen_epoch ~= "" and seen_epoch ~= epoch then
  local before, now = tonumber(seen_epoch), tonumber(epoch)
  is_other = not before or not now or now < before
  local found = is_other and {} or redis.call("HGETALL", ends)
  for i = 1, #found, 2 do
    is_other = is_other or (tonumber(found[i]) > before and tonumber(found[i + 1]) < seen)
  end
end
