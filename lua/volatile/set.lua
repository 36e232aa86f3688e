-- Set fields: all of them, each with the same time to live.
-- includes: volatile/_fields
-- keys: fields, times
-- args: native:int, ttl:int, items...
-- returns: {"set", new, "native" | "sorted-set"} | {"foreign", key}
--
-- An item is 2 arguments: field, value.  `ttl` is in milliseconds; -1 is for ever.  `new` counts fields that were not live before.
-- `native` is 1 if the server's own times to live are to be used: for fields whose deadline is not in `times` already.
-- Two fields that are over are deleted for each that is set: without recruits the hash does not grow for ever.
-- Cost: O(items × log fields).

local scheme = native == 1 and ttl > 0 and "native" or "sorted-set"
local deadline = as_score(deadline_after(ttl))

-- The deadline comes first: if the server then refuses the value, the deadline that was there before is put back.
local function set_indexed(name, value)
  local before = redis.call("ZSCORE", times, name)
  redis.call("ZADD", times, deadline, name)
  local reply = redis.pcall("HSET", fields, name, value)
  if type(reply) == "table" and reply.err then
    if before then
      redis.call("ZADD", times, before, name)
    else
      redis.call("ZREM", times, name)
    end
    error(reply.err, 0)
  end
end

-- False if the server has no such command: the client has asked another one.
local function set_native(name, value)
  local reply = redis.pcall("HSETEX", fields, "PXAT", deadline, "FIELDS", 1, name, value)
  if type(reply) == "table" and reply.err then
    if is_unknown_command(reply.err) then
      return false
    end
    error(reply.err, 0)
  end
  return true
end

local function set(name, value)
  if scheme == "native" and not redis.call("ZSCORE", times, name) then
    if set_native(name, value) then
      return
    end
    scheme = "sorted-set"
  end
  set_indexed(name, value)
end

rehearse(true)
forget_lost_hash()
local new = 0
for i = items, #ARGV, 2 do
  if not is_live(ARGV[i]) then
    new = new + 1
  end
  set(ARGV[i], ARGV[i + 1])
end
reap(#ARGV - items + 1)
return {"set", new, scheme}
