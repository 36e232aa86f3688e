-- Finishes messages, for settle.lua.
-- includes: queue/_moves

local KEEP_FINISHED, MOST_FINISHED = 60000, 50000

-- What is done leaves its parts together with the others: see `clear_finished`.
local ended, times, bodies = {}, {}, {}

local function finish(id, record)
  forget(id, record, true)
  record.state, record.at = "f", now
  save_record(id, record)
  ended[#ended + 1], times[#times + 1], times[#times + 2] = id, now, id
  local key = stream_key(record)
  bodies[key] = bodies[key] or {}
  table.insert(bodies[key], record.entry)
end

-- The records say that the messages are done before their leases and bodies go.
local function clear_finished()
  save_records()
  if #ended > 0 then
    redis.call("HINCRBY", meta, "done", #ended)
    redis.call("ZADD", finished, unpack(times))
    redis.call("ZREM", leases, unpack(ended))
    redis.call("ZREM", ages, unpack(ended))
    for key, entries in pairs(bodies) do
      call_or_nil("XDEL", key, unpack(entries))
    end
  end
end

-- A finished message is remembered for a minute, so that one that is written again after a lost reply is known.
local function forget_finished(limit)
  local old = redis.call("ZRANGEBYSCORE", finished, "-inf", string.format("%.0f", now - KEEP_FINISHED), "LIMIT", 0, limit)
  if #old == 0 and redis.call("ZCARD", finished) > MOST_FINISHED then
    old = redis.call("ZRANGE", finished, 0, limit)
  end
  if #old > 0 then
    redis.call("HDEL", messages, unpack(old))
    redis.call("ZREM", finished, unpack(old))
  end
end
