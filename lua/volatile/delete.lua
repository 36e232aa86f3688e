-- Delete fields.
-- includes: volatile/_fields
-- keys: fields, times
-- args: names...
-- returns: {"deleted", live} | {"foreign", key}
--
-- `live` counts those that were live.  Cost: O(names × log fields).

local live = 0
for _, deadline in pairs(read_deadlines(existing({unpack(ARGV, names)}))) do
  live = live + (is_live(deadline) and 1 or 0)
end
rehearse()
for i = names, #ARGV do
  redis.call("HDEL", fields, ARGV[i])
  redis.call("ZREM", times, ARGV[i])
end
return {"deleted", live}
