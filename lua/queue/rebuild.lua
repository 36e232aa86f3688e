-- Rebuild, step by step, what the bodies of messages tell: after a key of the queue was lost.  Repeated, it goes on.
-- includes: queue/_queue, queue/_tenants, queue/_moves
-- keys: meta, messages, waiting, ready, over, blocked, drained, accounts, limits, lanes, leases, delayed, dead, parked, ages, deadlines, uniques, windows, finished, takes, dwell, notices, streams...
-- args: start:int
-- returns: {"rebuilding", phase, lost} | {"rebuilt"} | {"foreign", key}
--
-- All streams that there could be are to be given.  With start = 1 it begins, unless it is under way.  Each message is counted once, by
-- the generation in its record, so that others may write, take and settle meanwhile.  Cost: O(STEP × log messages).

local STEP, NEW_LEASE = 100, 30000
local at = redis.call("HGET", meta, "rebuilding")
local lost = 0

-- Counts a message for its tenant, once in a generation.
local function count(id, record)
  redis.call(record.state == "x" and "ZREM" or "ZADD", ages, unpack(record.state == "x" and {id} or {string.format("%.0f", record.since), id}))
  if record.unique ~= "" and record.state ~= "x" and not (record.scope == "queued" and record.state == "l") then
    redis.call("HSETNX", uniques, record.unique, id)
  end
  if record.generation == queue.generation then
    return
  end
  local account = tenant_account(record.tenant)
  record.generation = queue.generation
  save_record(id, record)
  if record.state ~= "x" then
    account.bytes = account.bytes + record.bytes
  end
  if record.state == "l" then
    account.in_flight = account.in_flight + 1
  end
  if record.state == "w" then
    local lane, rank = record.tenant .. "\0" .. record.key, tonumber(string.sub(record.rank, 1, 14), 16)
    redis.call("HSET", lanes, lane, string.format("%.0f", math.max(rank, number(redis.call("HGET", lanes, lane)))))
  end
  account.has_moved = true
end

-- The entry of a stream belongs to a message that waits or is leased; any other is left over.
local function count_entry(stream, entry)
  local fields, id = entry[2], entry[2][2]
  local record = read_record(id)
  if not record and fields[11] == "record" then
    record = unpack_record(fields[12])
    record.state, record.stream, record.entry = "w", stream, entry[1]
    if redis.call("HEXISTS", parked, id) == 1 then
      record = nil
    end
  end
  if not record or record.stream ~= stream or record.entry ~= entry[1] or (record.state ~= "w" and record.state ~= "l") then
    redis.call("XDEL", KEYS[streams + stream], entry[1])
    return
  end
  if record.state == "w" then
    redis.call("ZADD", waiting, 0, waiting_member(id, record))
    watch_deadline(id, record)
  else
    redis.call("ZADD", leases, "NX", string.format("%.0f", now + NEW_LEASE), id)
  end
  count(id, record)
end

local function count_parked(id, body)
  local record = read_record(id) or unpack_record(cmsgpack.unpack(body)[4])
  if record.state ~= "d" and record.state ~= "x" then
    redis.call("HDEL", parked, id)
    return
  end
  redis.call("ZADD", record.state == "d" and delayed or dead, string.format("%.0f", record.at), id)
  if record.state == "d" then
    watch_deadline(id, record)
  end
  save_record(id, record)
  count(id, record)
end

-- A record without a body is of a message that is lost.
local function check_record(id, record)
  if record.state == "f" then
    redis.call("ZADD", finished, "NX", string.format("%.0f", record.at), id)
  elseif (record.state == "d" or record.state == "x") and redis.call("HEXISTS", parked, id) == 0
    or (record.state == "w" or record.state == "l") and not read_entry(record) then
    forget(id, record)
    redis.call("HDEL", messages, id)
    lost = lost + 1
  end
end

local function scan(command, key, cursor, call)
  local found = redis.call(command, key, cursor, "COUNT", STEP)
  for i = 1, #found[2], 2 do
    call(found[2][i], found[2][i + 1])
  end
  return found[1] ~= "0" and found[1] or nil
end

local function is_state(id, first, second)
  local record = read_record(id)
  return record and (record.state == first or record.state == second)
end

-- Removes from a set the ids of messages in none of these states.
local function prune(key, first, second, id_of)
  return function(cursor)
    return scan("ZSCAN", key, cursor, function(member)
      if not is_state(id_of and id_of(member) or member, first, second) then
        redis.call("ZREM", key, member)
      end
    end)
  end
end

local function id_in_line(member)
  return string.sub(member, string.find(member, "\0", 1, true) + 29)
end

local PHASES = {
  {"entries", function(cursor)
    local stream, after = string.match(cursor, "^(%d+) ?(.*)$")
    stream = tonumber(stream)
    local entries = redis.pcall("XRANGE", KEYS[streams + stream], after == "" and "-" or "(" .. after, "+", "COUNT", STEP)
    entries = entries.err and {} or entries
    for _, entry in ipairs(entries) do
      count_entry(stream, entry)
    end
    if #entries == STEP then
      return stream .. " " .. entries[STEP][1]
    end
    return stream + 1 < queue.streams and tostring(stream + 1) or nil
  end},
  {"parked", function(cursor) return scan("HSCAN", parked, cursor, count_parked) end},
  {"messages", function(cursor)
    return scan("HSCAN", messages, cursor, function(id, packed) check_record(id, unpack_record(packed)) end)
  end},
  {"waiting", prune(waiting, "w", "w", id_in_line)},
  {"leases", prune(leases, "l", "l")},
  {"delayed", prune(delayed, "d", "d")},
  {"dead", prune(dead, "x", "x")},
  {"finished", prune(finished, "f", "f")},
}

local function begin()
  for i = streams, #KEYS do
    if redis.call("TYPE", KEYS[i]).ok == "stream" then
      queue.streams = math.max(queue.streams, i - streams + 1)
    end
  end
  queue.generation = math.max(now, queue.generation + 1)
  queue.sequence = math.max(now, queue.sequence)
  redis.call("DEL", accounts, ready, over, blocked, drained, lanes, ages)
  return "1 0"
end

if not at and start == 0 then
  return {"rebuilt"}
end
at = at or begin()
local phase, cursor = string.match(at, "^(%d+) (.*)$")
phase = tonumber(phase)
local name, step = unpack(PHASES[phase])
cursor = step(cursor)
if not cursor then
  phase, cursor = phase + 1, "0"
end
save_accounts()
save_queue()
if lost > 0 then
  redis.call("HINCRBY", meta, "lost", lost)
end
if PHASES[phase] then
  redis.call("HSET", meta, "rebuilding", phase .. " " .. cursor)
  return {"rebuilding", name, lost}
end
redis.call("HDEL", meta, "rebuilding")
notify("b")
return {"rebuilt"}
