-- Shared by all scripts of a queue: its own state, and its clock.

local FORMAT, PADDING, MOST_STREAMS, MOST_AHEAD = "queue.v2", "%014x", 256, 60000

local function number(text)
  return tonumber(text or "") or 0
end

local queue, format, is_rebuilding, server, clock
do
  local found = redis.call("HMGET", meta, "format", "streams", "clock", "server", "virtual_time", "cost", "sequence", "generation", "listed",
    "closed", "keys", "tenants", "rebuilding", "weights", "back", "declared")
  format, is_rebuilding = found[1], found[13]
  queue = {
    streams = number(found[2]), virtual_time = number(found[5]), cost = number(found[6]), sequence = number(found[7]),
    generation = number(found[8]), listed = number(found[9]), is_closed = found[10] == "1", keys = number(found[11]),
    tenants = number(found[12]), weights = number(found[14]), declared = found[16] or "",
  }
  if format and format ~= FORMAT then
    return {"foreign", meta}
  end
  -- The queue's clock, in milliseconds.  When the server's clock is set back, as by a failover, it does not go back: it runs at half speed
  -- until the server's has caught up, so leases still expire, and nothing happens before it is due twice.  But a server's clock that was
  -- far ahead, and is corrected, takes it `back`: sweep.lua moves what was timed by it.
  local time = redis.call("TIME")
  server = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local seen = tonumber(found[4] or "") or server
  clock = math.max(server, (tonumber(found[3] or "") or server) + math.max(0, server - seen) / 2)
  local back = seen > server and clock > server + MOST_AHEAD and clock - server or 0
  clock, queue.back = clock - back, number(found[15]) + back
end
local now = math.floor(clock)

-- As redis.call, but nil if the key holds another type: one stream that something else has overwritten does not stop the others.
local function call_or_nil(...)
  local reply = redis.pcall(...)
  local failure = type(reply) == "table" and reply.err
  if failure and not string.find(failure, "WRONGTYPE", 1, true) then
    error(failure, 0)
  end
  return not failure and reply or nil
end

-- The stream of a hand with the smallest backlog: the first empty one, or the shortest.  An entry leaves its stream with its message,
-- so the length is what waits or is leased.  Streams of another type are passed over; if a hand has no other, any stream serves.
local lengths = {}
local function choose_stream(hand)
  local chosen, shortest
  local function try(stream)
    if lengths[stream] == nil then
      lengths[stream] = stream < queue.streams and call_or_nil("XLEN", KEYS[streams + stream]) or false
    end
    local length = lengths[stream]
    if length and (not shortest or length < shortest) then
      chosen, shortest = stream, length
    end
    return shortest == 0
  end
  for stream in string.gmatch(hand, "%d+") do
    if try(tonumber(stream)) then
      return chosen
    end
  end
  for stream = 0, chosen and -1 or queue.streams - 1 do
    if try(stream) then
      break
    end
  end
  return chosen
end

-- How many there are of the keys that nothing else tells of, and of the accounts, without which no limit in flight holds.
local function count_keys()
  return redis.call("EXISTS", accounts, lanes, drained, deadlines, uniques, windows, gates, openings)
end

-- Whether a script before this one was interrupted by a command that Redis refused, or a key has disappeared since then: the next
-- sweep asks for a rebuild.
local is_suspect = false
local function was_interrupted()
  return format and (not queue.is_closed or queue.keys ~= count_keys())
end

-- The first write of a script that changes the queue: from here to `save_queue` its parts do not agree.  When memory is full, Redis
-- refuses a script's first write if that could need memory, and lets a script that has written go on: taking and finishing must
-- work then, and writing must not.
local function begin_writing(needs_memory)
  is_suspect = was_interrupted()
  if needs_memory then
    redis.call("HSET", meta, "closed", 0)
  else
    redis.call("HDEL", meta, "closed")
  end
end

-- Writes the queue's state at the end of a script that changes it.
local function save_queue()
  redis.call("HSET", meta, "format", FORMAT, "streams", queue.streams, "clock", string.format("%.1f", clock),
    "server", string.format("%.0f", server), "virtual_time", string.format("%.6f", queue.virtual_time),
    "cost", string.format("%.6f", queue.cost), "sequence", string.format("%.0f", queue.sequence),
    "generation", queue.generation, "listed", queue.listed, "tenants", queue.tenants,
    "weights", string.format("%.6f", queue.weights), "closed", is_suspect and 0 or 1,
    "keys", count_keys(), "back", string.format("%.0f", queue.back))
end

-- Whether the queue has contents although its state is gone: it has to be rebuilt first.  Before a script makes a new queue, the
-- rebuild looks at all streams that there could be, not only at those that the caller knows.
local function is_lost(makes_new)
  if format then
    return false
  elseif makes_new and #KEYS - streams + 1 < MOST_STREAMS then
    return true
  end
  for i = streams, #KEYS do
    if redis.call("EXISTS", KEYS[i]) == 1 then
      return true
    end
  end
  return redis.call("EXISTS", messages, parked) > 0
end
