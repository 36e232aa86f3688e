-- Shared by all scripts of a queue: its own state, its clock, and the records of its messages.
-- keys: meta, messages, parked, streams...
--
-- A message is in one state: (w)aiting, (l)eased, (d)elayed, dea(x), or (f)inished, of which the record is kept for a while.
-- The body of one that waits or is leased is an entry of a stream; that of one that is delayed or dead is parked in a hash, since
-- an old entry would keep the memory of its neighbours.

local FORMAT = "queue.v1"
local PADDING = "%014x"

local function number(text)
  return tonumber(text or "") or 0
end

local found = redis.call("HMGET", meta, "format", "streams", "clock", "server", "floor", "cost", "sequence", "generation")
local format = found[1]
local queue = {
  streams = number(found[2]), floor = number(found[5]), cost = number(found[6]),
  sequence = number(found[7]), generation = number(found[8]),
}
if format and format ~= FORMAT then
  return {"foreign", meta}
end

-- The queue's clock, in milliseconds, never goes back.  After the server's clock was set back, it runs at half speed until the
-- server's has caught up: leases still expire, and nothing happens before it is due twice.
local time = redis.call("TIME")
local server = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local elapsed = math.max(0, server - (tonumber(found[4] or "") or server))
local clock = math.max(server, (tonumber(found[3] or "") or server) + elapsed / 2)
local now = math.floor(clock)

-- Writes the queue's state at the end of a script that changes it.
local function save_queue()
  redis.call("HSET", meta, "format", FORMAT, "streams", queue.streams, "clock", string.format("%.1f", clock),
    "server", string.format("%.0f", server), "floor", string.format("%.6f", queue.floor),
    "cost", string.format("%.6f", queue.cost), "sequence", string.format("%.0f", queue.sequence),
    "generation", queue.generation)
end

-- Whether the queue has contents although its state is gone: it has to be rebuilt first.
local function is_lost()
  if format then
    return false
  end
  for i = streams, #KEYS do
    if redis.call("EXISTS", KEYS[i]) == 1 then
      return true
    end
  end
  return redis.call("EXISTS", messages, parked) > 0
end

-- A write that changes nothing.  When memory is full, Redis refuses a script's first write if it could need memory, and lets a
-- script that has written go on: taking and finishing must work then.
local function begin_writing()
  redis.call("ZREMRANGEBYRANK", waiting, 1, 0)
end

-- The order of the fields in a packed record.
local FIELDS = {
  "state", "tenant", "key", "stream", "entry", "rank", "attempts", "token", "charge", "bytes", "unique", "scope",
  "deadline", "since", "hand", "generation", "taken", "at",
}

local function unpack_record(packed)
  local record = {}
  for i, value in ipairs(cmsgpack.unpack(packed)) do
    record[FIELDS[i]] = value
  end
  return record
end

local function pack_record(record)
  local values = {}
  for i, name in ipairs(FIELDS) do
    values[i] = record[name]
  end
  return cmsgpack.pack(values)
end

local function read_record(id)
  local packed = redis.call("HGET", messages, id)
  return packed and unpack_record(packed)
end

local function save_record(id, record)
  redis.call("HSET", messages, id, pack_record(record))
end

-- The payload and headers of a message that waits or is leased; nil if they are gone.
local function read_entry(record)
  if not KEYS[streams + record.stream] then
    return nil
  end
  local entries = redis.pcall("XRANGE", KEYS[streams + record.stream], record.entry, record.entry)
  local fields = not entries.err and entries[1] and entries[1][2]
  if fields then
    return fields[8], fields[10]
  end
end

local function delete_entry(record)
  local key = KEYS[streams + record.stream]
  if key then
    -- A key of another type holds no entry.
    redis.pcall("XDEL", key, record.entry)
  end
end
