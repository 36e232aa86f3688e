-- Shared by all scripts of a volatile hash: the clock, and when a field's time is over.
-- keys: fields, times
--
-- A field's deadline is its score in `times`, or the time to live that the server keeps itself (HSETEX), never both.
-- A field that has neither is not returned: its deadline was lost, and it could be over.

local time = redis.call("TIME")
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now = math.floor(micros / 1000)

local types = {redis.call("TYPE", fields).ok, redis.call("TYPE", times).ok}
if types[1] ~= "none" and types[1] ~= "hash" then
  return {"foreign", fields}
elseif types[2] ~= "none" and types[2] ~= "zset" then
  return {"foreign", times}
end

-- Rounded up: a field lives for its whole time to live, and for less than a millisecond more.
local function deadline_after(ttl)
  return ttl < 0 and math.huge or math.ceil(micros / 1000) + ttl
end

local function as_score(deadline)
  return deadline == math.huge and "+inf" or string.format("%.0f", deadline)
end

local function is_unknown_command(error_text)
  return string.find(string.lower(error_text), "unknown %a*%s?command called from") ~= nil
end

-- The scores of fields, as text; false for each that is not in `times`.  Without the hash, they are those of fields that are gone.
local function read_scores(names)
  if types[1] == "none" or types[2] == "none" or #names == 0 then
    return {}
  end
  return redis.call("ZMSCORE", times, unpack(names))
end

-- The deadlines that the server keeps, or a number below zero for each field without one; none if it cannot keep any.
local function native_deadlines(names)
  if #names == 0 then
    return {}
  end
  local found = redis.pcall("HPEXPIRETIME", fields, "FIELDS", #names, unpack(names))
  if found.err and is_unknown_command(found.err) then
    return {}
  elseif found.err then
    error(found.err, 0)
  end
  return found
end

-- The deadlines of fields that are in the hash, by name; one that is unknown is missing, or below zero.
local function read_deadlines(names)
  local found, others, scores = {}, {}, read_scores(names)
  for i, name in ipairs(names) do
    if scores[i] then
      found[name] = tonumber(scores[i])
    else
      others[#others + 1] = name
    end
  end
  for i, deadline in ipairs(native_deadlines(others)) do
    found[others[i]] = deadline
  end
  return found
end

local function existing(names)
  local found = {}
  for _, name in ipairs(names) do
    if redis.call("HEXISTS", fields, name) == 1 then
      found[#found + 1] = name
    end
  end
  return found
end

-- At its deadline a field is over; the server's own commands return it for another millisecond.
local function is_live(deadline)
  return deadline ~= nil and deadline > now
end

-- The first writes of a script, which change nothing: a server that is full, or refuses one of these commands to this user, does so here.
-- The command that needs memory comes first, since Redis asks for memory at the first write alone.
local function rehearse(needs_memory)
  if needs_memory then
    redis.call("ZADD", times, "XX", 0, "")
  end
  redis.call("ZRANGEBYSCORE", times, "-inf", 0, "LIMIT", 0, 0)
  redis.call("HDEL", fields, "")
  redis.call("ZREM", times, "")
end

-- Deletes fields whose time is over, at most so many.
local function reap(limit)
  local over = redis.call("ZRANGEBYSCORE", times, "-inf", as_score(now), "LIMIT", 0, limit)
  if #over > 0 then
    redis.call("HDEL", fields, unpack(over))
    redis.call("ZREM", times, unpack(over))
  end
  return #over
end

-- A thread of the server's frees it: it may be of any size.
local function forget_lost_hash()
  if types[1] == "none" and types[2] ~= "none" then
    redis.call("UNLINK", times)
  end
end
