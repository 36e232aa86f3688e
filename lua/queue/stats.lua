-- Count what the queue holds, all at one moment; writes nothing.
-- includes: queue/_bodies
-- keys: queue/_keys
-- args: none...
-- returns: {"stats", name, value, …} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- `returning` are messages that pause because the worker that had them alone died, of those due next.
-- oldest, longest_wait (of those that could be handed over) and next_due are milliseconds from now; -1 if there is none.  A dwell is "quiet 7", its count: so many messages were handed over
-- within 2^7 ms in the last five to ten minutes, of tenants that held a small part of the queue.  Cost: O(streams + LOOKED_AT).

-- So many of the oldest messages are looked at, since those that are snoozed have no age until they are due; and of those due next.
local LOOKED_AT = 100

if is_lost() then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
local reply = {"stats"}
local function tell(name, value)
  reply[#reply + 1] = name
  reply[#reply + 1] = type(value) == "number" and string.format("%.0f", value) or value
end

tell("streams", queue.streams)
for name, key in pairs({waiting = waiting, leased = leases, delayed = delayed, dead = dead, ready = ready, over = over, blocked = blocked}) do
  tell(name, redis.call("ZCARD", key))
end
for _, name in ipairs({"written", "done", "died", "reclaimed", "lost"}) do
  tell(name, number(redis.call("HGET", meta, name)))
end

local damaged = 0
for i = streams, streams + queue.streams - 1 do
  local kind = redis.call("TYPE", KEYS[i]).ok
  damaged = damaged + ((kind ~= "stream" and kind ~= "none") and 1 or 0)
end
tell("damaged", damaged)

local oldest, longest_wait, ids = -1, -1, redis.call("ZRANGEBYSCORE", ages, "-inf", string.format("%.0f", now), "WITHSCORES", "LIMIT", 0, LOOKED_AT)
for i = 1, #ids, 2 do
  local record = read_record(ids[i])
  local age = now - tonumber(ids[i + 1])
  if oldest < 0 and (not record or record.state ~= "d" or record.attempts > 0) then
    oldest = age
  end
  if record and record.state == "w" then
    longest_wait = age
    break
  end
end
-- At most: they are younger than all that were looked at.
local youngest = #ids == 2 * LOOKED_AT and now - tonumber(ids[#ids]) or -1
if oldest < 0 and redis.call("EXISTS", waiting, leases) > 0 then
  oldest = youngest
end
if longest_wait < 0 and redis.call("EXISTS", waiting) > 0 then
  longest_wait = youngest
end
tell("oldest", oldest)
tell("longest_wait", longest_wait)
local next_ones, returning = redis.call("ZRANGE", delayed, 0, LOOKED_AT - 1, "WITHSCORES"), 0
for i = 1, #next_ones, 2 do
  local record = read_record(parked_id(next_ones[i]))
  returning = returning + (record and record.suspect > 0 and 1 or 0)
end
tell("returning", returning)
tell("next_due", next_ones[2] and math.max(0, tonumber(next_ones[2]) - now) or -1)

local counts = {}
local all = redis.call("HGETALL", dwell)
for i = 1, #all, 2 do
  local window, bucket = string.match(all[i], "^(%d+) (%a+ %d+)$")
  if window and tonumber(window) >= math.floor(now / 300000) - 1 then
    counts[bucket] = (counts[bucket] or 0) + tonumber(all[i + 1])
  end
end
for bucket, count in pairs(counts) do
  tell(bucket, count)
end
return reply
