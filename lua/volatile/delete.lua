-- Delete fields.
-- includes: volatile/_fields
-- keys: fields, times
-- args: names...
-- returns: {"deleted", live} | {"foreign", key}
--
-- `live` counts those that were live.  Cost: O(names × log fields).

rehearse()
local live = 0
for i = names, #ARGV do
  if is_live(ARGV[i]) then
    live = live + 1
  end
  redis.call("HDEL", fields, ARGV[i])
  redis.call("ZREM", times, ARGV[i])
end
return {"deleted", live}
