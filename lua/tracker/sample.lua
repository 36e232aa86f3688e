-- Sample ids, and begin to check them.
-- includes: tracker/_ids
-- keys: tracked, position, checks
-- args: token, count:int
-- returns: {"sampled", id, …} | {"foreign", key}
--
-- Cost: O(count).

local reply = {"sampled"}
for _, id in ipairs(redis.call("SRANDMEMBER", tracked, count)) do
  redis.call("HSET", checks, id, token)
  reply[#reply + 1] = id
end
return reply
