-- Sweep: dead-letter what is past its deadline, shrink the queue, drop what has no use any more, and check that all parts agree.
-- includes: queue/_due, queue/_strike, queue/_whole
-- keys: queue/_keys
-- args: wanted:int, interval:int
-- returns: {"swept", streams, expired, is_whole} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- Nothing is done, and 1 is returned for is_whole, if the last sweep was less than `interval` milliseconds ago: of all readers of a queue,
-- one sweeps.  The queue shrinks to `wanted` streams once the surplus ones are empty.  is_whole is 0 if a key was deleted or changed by hand, or a
-- rebuild has begun: rebuild.lua is to be called then.  Cost: O(streams + (100 + workers) × log messages).

local FORGET_WORKER, FORGET_TENANTS, MOST_TIMED = 3600000, 1000, 5000

-- The queue's clock was set back.  Leases, names that hold for a time, and pauses after attempts would last that much longer.
local function set_back(by)
  local after = "(" .. string.format("%.0f", now + by - 10000)
  for _, key in ipairs({leases, windows}) do
    local timed = redis.call("ZRANGEBYSCORE", key, after, "+inf", "WITHSCORES", "LIMIT", 0, MOST_TIMED)
    for i = 1, #timed, 2 do
      redis.call("ZADD", key, string.format("%.0f", tonumber(timed[i + 1]) - by), timed[i])
    end
  end
  for _, member in ipairs(redis.call("ZRANGEBYSCORE", delayed, after, "+inf", "LIMIT", 0, MOST_TIMED)) do
    local record = read_record(parked_id(member))
    if record and record.at ~= record.since then
      record.at = record.at - by
      redis.call("ZADD", delayed, string.format("%.0f", record.at), member)
      save_record(parked_id(member), record)
    end
  end
  for _, key in ipairs({blocked, openings}) do
    redis.call("ZUNIONSTORE", key, 1, key, "WEIGHTS", 0)
  end
  redis.call("DEL", dwell)
  queue.back = 0
end

if is_lost() then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
local swept = redis.call("HGET", meta, "swept")
if swept and queue.back == 0 and now - number(swept) < interval then
  return {"swept", queue.streams, 0, 1}
end
begin_writing()
if queue.back > 0 then
  set_back(queue.back)
end
redis.call("HSET", meta, "swept", string.format("%.0f", now))

local expired = 0
local late = redis.call("ZRANGEBYSCORE", deadlines, "-inf", string.format("%.0f", now), "LIMIT", 0, STEP)
for _, id in ipairs(late) do
  local record = read_record(id)
  if record and record.state == "w" then
    local payload, headers = read_entry(record)
    if payload then
      strike_out(tenant_account(record.tenant), id, record)
      dead_letter(id, record, "its deadline has passed", payload, headers)
    end
  elseif record and record.state == "d" then
    local payload, headers = read_parked(id)
    if payload then
      redis.call("ZREM", delayed, parked_member(id, record))
      dead_letter(id, record, "its deadline has passed", payload, headers)
    end
  end
  redis.call("ZREM", deadlines, id)
  expired = expired + 1
end

for _, unique in ipairs(redis.call("ZRANGEBYSCORE", windows, "-inf", string.format("%.0f", now), "LIMIT", 0, STEP)) do
  redis.call("HDEL", uniques, unique)
  redis.call("ZREM", windows, unique)
end
-- A reader is forgotten when it is closed; of those that died, some are looked at in each sweep.
local known = redis.call("HSCAN", takes, number(redis.call("HGET", meta, "scanned")), "COUNT", STEP)
for i = 1, #known[2], 2 do
  if unpack_take(known[2][i + 1]).at < now - FORGET_WORKER then
    redis.call("HDEL", takes, known[2][i])
  end
end
redis.call("HSET", meta, "scanned", known[1])
for _, field in ipairs(redis.call("HKEYS", dwell)) do
  if tonumber(string.match(field, "^%d+")) < math.floor(now / 300000) - 1 then
    redis.call("HDEL", dwell, field)
  end
end

forget_drained(FORGET_TENANTS)

local surplus, entries = 0, 0
for stream = 0, queue.streams - 1 do
  local length = call_or_nil("XLEN", KEYS[streams + stream]) or 0
  entries = entries + length
  surplus = surplus + (stream >= wanted and length or 0)
end
if wanted >= 1 and wanted < queue.streams and surplus == 0 then
  for stream = wanted, queue.streams - 1 do
    if redis.call("TYPE", KEYS[streams + stream]).ok == "stream" then
      redis.call("DEL", KEYS[streams + stream])
    end
  end
  queue.streams = wanted
end

if save_accounts() then
  wake()
end
save_queue()
local is_whole = not is_suspect and redis.call("HEXISTS", meta, "rebuilding") == 0 and #parts_apart(entries) == 0
return {"swept", queue.streams, expired, is_whole and 1 or 0}
