-- End checks, and remove those ids that have no queued work and were not added since their check began.
-- includes: tracker/_ids
-- keys: tracked, position, checks
-- args: token, kept:int, ids...
-- returns: {"removed", id, …} | {"foreign", key}
--
-- The first `kept` ids have queued work and stay.  Cost: O(ids).

local reply = {"removed"}
for i = ids, #ARGV do
  local id = ARGV[i]
  if redis.call("HGET", checks, id) == token then
    redis.call("HDEL", checks, id)
    if i >= ids + kept and redis.call("SREM", tracked, id) == 1 then
      reply[#reply + 1] = id
    end
  end
end
return reply
