-- Whether the server can keep the times to live of fields itself: whether it knows all of some commands.
-- keys: fields, times
-- args: commands...
-- returns: {"native", 1 | 0}
--
-- The server that holds the keys is asked: another of its Cluster may be of another release.  It writes nothing.

local known = 1
for _, found in ipairs(redis.call("COMMAND", "INFO", unpack(ARGV, commands))) do
  known = found and known or 0
end
return {"native", known}
