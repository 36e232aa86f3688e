-- Shared by the scripts that read: where the log begins and ends.
-- includes: log/_entry
-- keys: stream, newest_epoch
--
-- `first` is the offset of the oldest record; one past the tail if there is none.  `tail` is the last offset ever given out;
-- a stream that was evicted to its end still knows it.  `damage` is an entry that is none of ours.

local epoch = redis.call("GET", newest_epoch) or "0"
local first, tail, damage = 1, 0, nil
if redis.call("EXISTS", stream) == 1 then
  local info = redis.call("XINFO", "STREAM", stream)
  for i = 1, #info, 2 do
    if info[i] == "last-generated-id" then
      tail = offset_of(info[i + 1])
      damage = not tail and "entry " .. info[i + 1] or nil
    elseif info[i] == "first-entry" then
      first = info[i + 1]
    end
  end
  if first and not damage then
    local oldest = first
    first = describe(oldest)
    damage = not first and "entry " .. oldest[1] or nil
  end
  first = first or not damage and tail + 1
end
