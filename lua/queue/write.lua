-- Write messages: each into a stream of its tenant's hand, or delayed; repeated, it changes nothing.
-- includes: queue/_queue, queue/_records, queue/_accounts, queue/_turns, queue/_line, queue/_moves
-- keys: meta, messages, waiting, ready, over, blocked, drained, accounts, limits, lanes, leases, delayed, dead, parked, ages, deadlines, uniques, windows, finished, takes, dwell, notices, streams...
-- args: wanted:int, items...
-- returns: {"written", result, …} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- A message is 11 arguments: id, tenant, key, hand, due, deadline, unique, scope, window, payload, headers.  Times are milliseconds
-- since 1970, or from now with a "+"; "" is none.  `hand` is the numbers of its streams.  A result is "written"; "known": the id is,
-- as after a lost reply; "duplicate <id>" of another message of this unique name; "full <bytes> <limit>" of the tenant; or "damaged":
-- no stream can be written.  Cost: O(messages × (hand + log messages)).

local WIDTH = 11
if is_lost(true) then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
begin_writing(true)
queue.streams = math.max(queue.streams, wanted)

local function moment(text)
  if string.sub(text, 1, 1) == "+" then
    return now + tonumber(string.sub(text, 2))
  end
  return number(text)
end

-- The message that holds a unique name, unless its time is over.
local function holder_of(unique)
  local id = redis.call("HGET", uniques, unique)
  local ends = id and redis.call("ZSCORE", windows, unique)
  if ends then
    return tonumber(ends) > now and id
  end
  local record = id and read_record(id)
  return record and record.state ~= "f" and record.state ~= "x" and id
end

local function reserve_unique(id, record, window)
  redis.call("HSET", uniques, record.unique, id)
  redis.call("ZREM", windows, record.unique)
  if record.scope == "window" then
    redis.call("ZADD", windows, string.format("%.0f", now + number(window)), record.unique)
  end
end

local function write(id, tenant, key, hand, due, deadline, unique, scope, window, payload, headers)
  if redis.call("HEXISTS", messages, id) == 1 then
    return "known"
  end
  local other = unique ~= "" and holder_of(unique)
  if other then
    return "duplicate " .. other
  end
  local account = tenant_account(tenant)
  local most = account.limits.bytes
  if most and account.bytes + #payload > most then
    return string.format("full %.0f %.0f", account.bytes, most)
  end
  local record = {
    state = "w", tenant = tenant, key = key, stream = -1, entry = "", rank = "", attempts = 0, token = "", charge = 0,
    bytes = #payload, unique = unique, scope = scope, deadline = moment(deadline), since = now, hand = hand,
    generation = queue.generation, taken = 0, at = now,
  }
  local due_at = moment(due)
  if due_at > now then
    record.since = due_at
    park(id, record, "d", due_at, "", payload, headers)
  elseif enqueue(id, record, payload, headers) then
    watch_deadline(id, record)
  else
    return "damaged"
  end
  account.bytes = account.bytes + record.bytes
  redis.call("ZADD", ages, record.since, id)
  if unique ~= "" then
    reserve_unique(id, record, window)
  end
  return "written"
end

local reply, written = {"written"}, 0
for from = items, #ARGV, WIDTH do
  local result = write(unpack(ARGV, from, from + WIDTH - 1))
  reply[#reply + 1] = result
  written = written + (result == "written" and 1 or 0)
end
redis.call("HINCRBY", meta, "written", written)
save_accounts()
save_queue()
if written > 0 then
  notify("w")
end
return reply
