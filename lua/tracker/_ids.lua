-- Shared by all scripts of a queue tracker.
-- keys: tracked, position, checks
--
-- `checks` has the ids that a remover is asking the database for, each with that remover's token.  An addition takes its id out,
-- so that the answer, which is older than the addition, removes nothing.

for key, kind in pairs({[tracked] = "set", [position] = "string", [checks] = "hash"}) do
  local found = redis.call("TYPE", key).ok
  if found ~= "none" and found ~= kind then
    return {"foreign", key}
  end
end

-- The check ends first: an id without a check stays where it is.
local function add(from)
  local new = 0
  for i = from, #ARGV do
    redis.call("HDEL", checks, ARGV[i])
    new = new + redis.call("SADD", tracked, ARGV[i])
  end
  return new
end
