-- Shared by the scripts that move messages from one state to another.
-- includes: queue/_line

-- Parks the body of a message that is to be delayed (d) or dead (x); `at` is when it is due, or when it died.
local function park(id, record, state, at, reason, payload, headers)
  local before = record.stream >= 0 and {stream = record.stream, entry = record.entry}
  record.state, record.stream, record.entry, record.rank, record.at = state, -1, "", "", at
  redis.call("HSET", parked, id, pack_parked(payload, headers, reason, record))
  redis.call("ZADD", state == "d" and delayed or dead, string.format("%.0f", at), parked_member(id, record))
  save_record(id, record)
  if state == "d" then
    watch_deadline(id, record)
  end
  redis.call("ZREM", leases, id)
  if before then
    delete_entry(before)
  end
end

-- A message that moves while the queue is being rebuilt is counted here, if it has not been yet; it may not be met any more.
local function count_moved(account, id, record)
  if record.generation ~= queue.generation then
    record.generation = queue.generation
    account.bytes = account.bytes + record.bytes
    save_record(id, record)
    redis.call("ZADD", ages, record.since, id)
  end
end

-- Brings a parked message back into its tenant's line.  Returns false if no stream can be written now, nil if the body is gone.
local function unpark(id, record)
  local payload, headers = read_parked(id)
  if not payload then
    return nil
  end
  if not enqueue(id, record, payload, headers) then
    return false
  end
  count_moved(tenant_account(record.tenant), id, record)
  redis.call("ZREM", delayed, parked_member(id, record))
  redis.call("ZREM", dead, parked_member(id, record))
  redis.call("HDEL", parked, id)
  return true
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

local function release_unique(id, record, scope)
  if record.scope == scope and redis.call("HGET", uniques, record.unique) == id then
    redis.call("HDEL", uniques, record.unique)
  end
end

-- Removes all that is known of a message but its record and its lease; with `keeps_age`, the caller removes that.
local function forget(id, record, keeps_age)
  if not keeps_age then
    redis.call("ZREM", ages, id)
  end
  if record.deadline > 0 then
    redis.call("ZREM", deadlines, id)
  end
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
    local gate = gating and gating.find(record)
    if gate then
      gate.in_flight = gate.in_flight - 1
    end
  end
end

-- Moves a message to the dead letters; its unique name is free again.
local function dead_letter(id, record, reason, payload, headers)
  local account = forget(id, record)
  redis.call("HINCRBY", meta, "died", 1)
  park(id, record, "x", now, reason, payload, headers)
  mark_moved(account)
end

-- Wakes one of the readers that wait, or the next one that is going to.  One that leaves something wakes another: see take.lua.
local function wake()
  if redis.call("LLEN", wakes) == 0 then
    redis.call("LPUSH", wakes, "1")
  end
end
