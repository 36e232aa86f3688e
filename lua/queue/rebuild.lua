-- Rebuild, step by step, from the bodies of messages, after a key of the queue was lost.  Repeated, it goes on.
-- includes: queue/_count
-- keys: queue/_keys
-- args: start:int
-- returns: {"rebuilding", phase, lost} | {"rebuilt"} | {"foreign", key}
--
-- All streams that there could be are to be given.  With start = 1 it begins, unless it is under way.  Each message is counted once, by
-- the generation in its record, so that others may write, take and settle meanwhile.  Cost: O(STEP × log messages).

local STEP = 100
local at = redis.call("HGET", meta, "rebuilding")

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

local PHASES = {
  {"entries", function(cursor)
    local stream, after = string.match(cursor, "^(%d+) ?(.*)$")
    stream = tonumber(stream)
    local from = after == "" and "-" or "(" .. after
    local entries = call_or_nil("XRANGE", KEYS[streams + stream], from, "+", "COUNT", STEP) or {}
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
  {"waiting", function(cursor) return scan("ZSCAN", waiting, cursor, check_member) end},
  {"leases", prune(leases, "l", "l")},
  {"delayed", prune(delayed, "d", "d", parked_id)},
  {"dead", prune(dead, "x", "x", parked_id)},
  {"finished", prune(finished, "f", "f")},
}

local function begin()
  for i = streams, #KEYS do
    if redis.call("TYPE", KEYS[i]).ok == "stream" then
      queue.streams = math.max(queue.streams, i - streams + 1)
    end
  end
  queue.streams = math.max(queue.streams, 1)
  queue.generation = math.max(now, queue.generation + 1)
  queue.sequence = math.max(now, queue.sequence)
  queue.listed, queue.tenants, queue.weights = 0, 0, 0
  is_suspect, is_rebuilding = false, true
  redis.call("DEL", accounts, ready, over, blocked, drained, lanes, ages, gates, openings)
  return "1 0"
end

if not at and start == 0 then
  return {"rebuilt"}
end
-- Before anything is deleted: a key that holds another type is not the queue's.
for key, kind in pairs({
  [messages] = "hash", [waiting] = "zset", [ready] = "zset", [over] = "zset", [blocked] = "zset", [drained] = "zset",
  [accounts] = "hash", [limits] = "hash", [lanes] = "hash", [leases] = "zset", [delayed] = "zset", [dead] = "zset",
  [parked] = "hash", [ages] = "zset", [deadlines] = "zset", [uniques] = "hash", [windows] = "zset", [finished] = "zset",
  [wakes] = "list", [gates] = "hash", [openings] = "zset",
}) do
  local found_kind = redis.call("TYPE", key).ok
  if found_kind ~= kind and found_kind ~= "none" then
    return {"foreign", key}
  end
end
begin_writing()
if start == 1 and is_suspect then
  -- It was interrupted, or a key has disappeared meanwhile: it begins again.
  at = nil
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
redis.call("HINCRBY", meta, "lost", lost)
if PHASES[phase] then
  redis.call("HSET", meta, "rebuilding", phase .. " " .. cursor)
  return {"rebuilding", name, lost}
end
redis.call("HDEL", meta, "rebuilding")
for _, key in ipairs({blocked, openings}) do
  redis.call("ZUNIONSTORE", key, 1, key, "WEIGHTS", 0)
end
wake()
return {"rebuilt"}
