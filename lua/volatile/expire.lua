-- Give live fields another time to live; their values stay.
-- includes: volatile/_fields
-- keys: fields, times
-- args: ttl:int, names...
-- returns: {"expires", 1 | 0, …} | {"foreign", key}
--
-- `ttl` is in milliseconds from now; -1 is for ever.  0: there is no such live field, and nothing has changed for it.
-- A field's deadline stays where it is kept, except that only `times` can say "for ever".  Cost: O(names × log fields).

local deadline = as_score(deadline_after(ttl))

local function make_permanent(name)
  redis.call("ZADD", times, "+inf", name)
  local reply = redis.pcall("HPERSIST", fields, "FIELDS", 1, name)
  if reply.err then
    redis.call("ZREM", times, name)
    error(reply.err, 0)
  end
end

local deadlines = read_deadlines(existing({unpack(ARGV, names)}))

local function expire(name)
  if not is_live(deadlines[name]) then
    return 0
  elseif redis.call("ZSCORE", times, name) then
    redis.call("ZADD", times, deadline, name)
  elseif ttl < 0 then
    make_permanent(name)
  else
    redis.call("HPEXPIREAT", fields, deadline, "FIELDS", 1, name)
  end
  return 1
end

local reply = {"expires"}
for i = names, #ARGV do
  reply[#reply + 1] = expire(ARGV[i])
end
return reply
