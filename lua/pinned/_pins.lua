-- Shared by all scripts of pinned keys: the clock, and the records.
-- keys: pins, times, counter
--
-- A record is one field of `pins`: "<deadline> <number> <body>", the deadline in 14 digits of milliseconds.  It alone says what holds; its
-- score in `times` is there so that it can be found when its time is over, and may be earlier or missing.

local WIDTH = 14
local time = redis.call("TIME")
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now = math.floor(micros / 1000)

for key, kind in pairs({[pins] = "hash", [times] = "zset", [counter] = "string"}) do
  local found = redis.call("TYPE", key).ok
  if found ~= "none" and found ~= kind then
    return {"foreign", key}
  end
end

-- Rounded up: a pin lasts for its whole time, and for less than a millisecond more.
local function deadline_after(ttl)
  return math.ceil(micros / 1000) + ttl
end

local function deadline_in(text)
  return tonumber(string.sub(text, 1, WIDTH)) or 0
end

-- The live record of a name; nil if there is none.
local function read_pin(name)
  local text = redis.call("HGET", pins, name)
  local deadline = text and deadline_in(text) or 0
  if deadline <= now then
    return nil
  end
  local from, to, number = string.find(text, "^ (%d+) ", WIDTH + 1)
  return from and {deadline = deadline, number = tonumber(number), body = string.sub(text, to + 1)}
end

-- The first writes of a script, which change nothing: a server that is full, or refuses one of these commands to this user, does so here.
-- The command that needs memory comes first, since Redis asks for memory at the first write alone.
local function rehearse(needs_memory)
  if needs_memory then
    redis.call("ZADD", times, "XX", 0, "")
  end
  redis.call("ZRANGEBYSCORE", times, "-inf", 0, "LIMIT", 0, 0)
  redis.call("HGET", pins, "")
  redis.call("HDEL", pins, "")
  redis.call("ZREM", times, "")
end

-- The record comes last: nothing has happened before it is written.
local function write_pin(name, deadline, number, body)
  local before = redis.call("ZSCORE", times, name)
  redis.call("ZADD", times, deadline, name)
  local reply = redis.pcall("HSET", pins, name, string.format("%014.0f %.0f ", deadline, number) .. body)
  if type(reply) == "table" and reply.err then
    if before then
      redis.call("ZADD", times, before, name)
    else
      redis.call("ZREM", times, name)
    end
    error(reply.err, 0)
  end
end

local function delete_pin(name)
  redis.call("HDEL", pins, name)
  redis.call("ZREM", times, name)
end

-- Deletes records whose time is over, at most so many; a score that is too early is put right.
local function reap(limit)
  local over = 0
  for _, name in ipairs(redis.call("ZRANGEBYSCORE", times, "-inf", string.format("%.0f", now), "LIMIT", 0, limit)) do
    local pin = read_pin(name)
    if pin then
      redis.call("ZADD", times, pin.deadline, name)
    else
      delete_pin(name)
      over = over + 1
    end
  end
  return over
end
