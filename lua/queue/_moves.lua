-- Shared by the scripts that move messages from one state to another.  Include it after queue/_tenants.
-- keys: messages, waiting, lanes, leases, delayed, dead, parked, ages, deadlines, uniques, windows, finished, notices, streams...

-- The stream of a hand with the smallest backlog: the first empty one, or the shortest.  An entry leaves its stream with its message,
-- so the length is what waits or is leased.  Streams of another type are passed over; if a hand has no other, any stream serves.
local function choose_stream(hand)
  local chosen, shortest
  local function try(stream)
    local length = stream < queue.streams and redis.pcall("XLEN", KEYS[streams + stream])
    if type(length) == "number" and (not shortest or length < shortest) then
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

local function watch_deadline(id, record)
  if record.deadline > 0 then
    redis.call("ZADD", deadlines, string.format("%.0f", record.deadline), id)
  end
end

local function waiting_member(id, record)
  return record.tenant .. "\0" .. record.rank .. id
end

-- The message's place in its tenant's line.  The tenant's keys take turns: a message comes behind those of its own key, and beside
-- those of the others.
local function rank_message(account, record)
  local lane = record.tenant .. "\0" .. record.key
  local rank = math.max(account.rank, number(redis.call("HGET", lanes, lane))) + 1
  redis.call("HSET", lanes, lane, string.format("%.0f", rank))
  queue.sequence = queue.sequence + 1
  record.rank = string.format(PADDING .. PADDING, rank, queue.sequence)
end

-- Appends the body to a stream, and lines the message up.  Returns false if no stream can be written.
local function enqueue(id, record, payload, headers)
  local stream = choose_stream(record.hand)
  if not stream then
    return false
  end
  local account = tenant_account(record.tenant)
  rank_message(account, record)
  record.state, record.stream, record.at = "w", stream, now
  record.entry = redis.call("XADD", KEYS[streams + stream], "*", "id", id, "tenant", record.tenant, "key", record.key,
    "payload", payload, "headers", headers, "record", pack_record(record))
  save_record(id, record)
  redis.call("ZADD", waiting, 0, waiting_member(id, record))
  account.has_moved = true
  return true
end

-- Puts a message that was handed over back where it was in its tenant's line.
local function put_back(id, record)
  tenant_account(record.tenant).has_moved = true
  record.state, record.at = "w", now
  save_record(id, record)
  redis.call("ZADD", waiting, 0, waiting_member(id, record))
  redis.call("ZREM", leases, id)
  watch_deadline(id, record)
end

-- Takes a message out of its tenant's line.
local function leave_line(account, id, record)
  redis.call("ZREM", waiting, waiting_member(id, record))
  local rank = tonumber(string.sub(record.rank, 1, 14), 16)
  account.rank = math.max(account.rank, rank)
  local lane = record.tenant .. "\0" .. record.key
  if number(redis.call("HGET", lanes, lane)) <= rank then
    redis.call("HDEL", lanes, lane)
  end
end

-- Parks the body of a message that is to be delayed (d) or dead (x); `at` is when it is due, or when it died.
local function park(id, record, state, at, reason, payload, headers)
  local before = record.stream >= 0 and {stream = record.stream, entry = record.entry}
  record.state, record.stream, record.entry, record.rank, record.at = state, -1, "", "", at
  redis.call("HSET", parked, id, cmsgpack.pack({payload, headers, reason, pack_record(record)}))
  redis.call("ZADD", state == "d" and delayed or dead, string.format("%.0f", at), id)
  save_record(id, record)
  if state == "d" then
    watch_deadline(id, record)
  end
  redis.call("ZREM", leases, id)
  if before then
    delete_entry(before)
  end
end

-- Brings a parked message back into its tenant's line.
local function unpark(id, record)
  local body = redis.call("HGET", parked, id)
  local values = body and cmsgpack.unpack(body)
  if not values or not enqueue(id, record, values[1], values[2]) then
    return false
  end
  redis.call("ZREM", delayed, id)
  redis.call("ZREM", dead, id)
  redis.call("HDEL", parked, id)
  return true
end

local function release_unique(id, record, scope)
  if record.scope == scope and redis.call("HGET", uniques, record.unique) == id then
    redis.call("HDEL", uniques, record.unique)
  end
end

-- Removes all that is known of a message but its record and its lease.
local function forget(id, record)
  redis.call("ZREM", ages, id)
  redis.call("ZREM", deadlines, id)
  release_unique(id, record, "queued")
  release_unique(id, record, "running")
  local account = tenant_account(record.tenant)
  if record.generation == queue.generation then
    account.bytes = account.bytes - record.bytes
  end
  return account
end

-- A message of which the lease has ended counts no longer as being in flight.
local function leave_flight(account, record)
  if record.generation == queue.generation then
    account.in_flight = account.in_flight - 1
  end
end

-- Moves a message to the dead letters; its unique name is free again.
local function bury(id, record, reason, payload, headers)
  local account = forget(id, record)
  redis.call("HINCRBY", meta, "died", 1)
  park(id, record, "x", now, reason, payload, headers)
  account.has_moved = true
end

local function notify(stream)
  return redis.call("XADD", notices, "MAXLEN", 1, "*", "s", stream)
end
