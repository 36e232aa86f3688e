-- Acknowledge: records are no longer pending; those that are not are ignored.
-- keys: due, pending
-- args: ranges...
-- returns: {"acknowledged", count}
--
-- `ranges`: first and last offset of each.  Cost: O(offsets, or what is pending if that is less, for each range).

local acknowledged = 0
local function acknowledge(member)
  acknowledged = acknowledged + redis.call("ZREM", due, member)
  redis.call("HDEL", pending, member)
end

for i = ranges, #ARGV, 2 do
  local first, last = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
  if last - first < redis.call("ZCARD", due) then
    for offset = first, last do
      acknowledge(string.format("%016.0f", offset))
    end
  else
    for _, member in ipairs(redis.call("ZRANGE", due, 0, -1)) do
      if first <= tonumber(member) and tonumber(member) <= last then
        acknowledge(member)
      end
    end
  end
end
return {"acknowledged", acknowledged}
