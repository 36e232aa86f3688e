-- Notes that a group is in use: about once a minute.  Include it after log/group/_group.
-- keys: seen
-- args: group
--
-- A server that refuses the write, or refuses it to this user, does not keep the group from reading.

local EVERY_MS = 60000

local function note_use()
  if now - tonumber(redis.call("ZSCORE", seen, group) or "0") >= EVERY_MS then
    local reply = redis.pcall("ZADD", seen, text_of(now), group)
    return not (type(reply) == "table" and reply.err)
  end
end
