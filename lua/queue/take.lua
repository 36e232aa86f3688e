-- Take messages: the next of the tenants whose turn it is, each under a lease; repeated, it returns the same.
-- includes: queue/_queue, queue/_tenants, queue/_moves
-- keys: meta, messages, waiting, ready, over, blocked, drained, accounts, limits, lanes, leases, delayed, dead, parked, ages, deadlines, uniques, windows, finished, takes, dwell, notices, streams...
-- args: request, worker, lease:int, count:int, most_bytes:int, preferred:int
-- returns: {"taken", streams, notice, wait, lost, {id, tenant, key, attempts, since, deadline, payload, headers}, …}
--   | {"streams", count} | {"lost"} | {"foreign", key}
--
-- `request` is the token of the leases.  `notice` is the newest notice: whoever waits for a later one misses nothing.  `wait` is the
-- time in milliseconds until something is due, or -1.  `lost` counts messages whose bodies are gone, and which are therefore forgotten.
-- First, whatever is due moves on: delayed messages, leases that have expired, tenants that may go again; 100 of each at most.
-- Cost: O((count + 300) × log messages).

local STEP = 100
if is_lost() then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
begin_writing()

local function due(key)
  return redis.call("ZRANGEBYSCORE", key, "-inf", string.format("%.0f", now), "LIMIT", 0, STEP)
end

local moved, lost = 0, 0

-- A message of which the body is gone: deleted by hand, or with a stream whose key was overwritten.
local function lose(id, record)
  local account = forget(id, record)
  redis.call("ZREM", leases, id)
  redis.call("ZREM", delayed, id)
  redis.call("HDEL", messages, id)
  redis.call("HINCRBY", meta, "lost", 1)
  account.has_moved = true
  lost = lost + 1
end

local function move_due()
  for _, id in ipairs(due(delayed)) do
    local record = read_record(id)
    if not record or not unpark(id, record) then
      if record then lose(id, record) end
      redis.call("ZREM", delayed, id)
    end
    moved = moved + 1
  end
  for _, id in ipairs(due(leases)) do
    local record = read_record(id)
    if record and record.state == "l" then
      local account = tenant_account(record.tenant)
      leave_flight(account, record)
      end_work(account, record, (now - record.taken) / 1000)
      record.token = ""
      put_back(id, record)
      redis.call("HINCRBY", meta, "reclaimed", 1)
    end
    redis.call("ZREM", leases, id)
    moved = moved + 1
  end
  for _, tenant in ipairs(due(blocked)) do
    tenant_account(tenant).has_moved = true
    moved = moved + 1
  end
  place_moved()
end

-- How long the message has waited, counted by powers of two of a millisecond, apart for tenants that hold a large part of the queue.
local function count_dwell(account, record, waiting_and_leased)
  local held = account.in_flight + redis.call("ZLEXCOUNT", waiting, "[" .. account.tenant .. "\0", "(" .. account.tenant .. "\1")
  local is_noisy = held >= 30 and held * 10 > waiting_and_leased
  local bucket = math.ceil(math.log(math.max(now - math.max(record.since, record.at), 1)) / math.log(2))
  redis.call("HINCRBY", dwell, string.format("%d %s %d", math.floor(now / 300000), is_noisy and "noisy" or "quiet", bucket), 1)
end

local held_before = redis.call("ZCARD", waiting) + redis.call("ZCARD", leases)
local reply, ids, bytes = {"taken", 0, "", -1, 0}, {}, 0

local function hand_over(account, id, record)
  leave_line(account, id, record)
  local payload, headers = read_entry(record)
  if not payload then
    return lose(id, record)
  elseif record.deadline > 0 and record.deadline <= now then
    bury(id, record, "its deadline has passed", payload, headers)
    return place(account)
  end
  count_dwell(account, record, held_before)
  record.state, record.attempts, record.token, record.taken, record.at = "l", record.attempts + 1, request, now, now
  record.charge = begin_work(account)
  save_record(id, record)
  redis.call("ZADD", leases, string.format("%.0f", now + lease), id)
  redis.call("ZREM", deadlines, id)
  release_unique(id, record, "queued")
  place(account)
  ids[#ids + 1], bytes = id, bytes + record.bytes
  reply[#reply + 1] = {id, record.tenant, record.key, record.attempts, string.format("%.0f", record.since),
    string.format("%.0f", record.deadline), payload, headers}
end

-- A message of the preferred stream, if its tenant is at most one message ahead of the one whose turn it is.
local function preferred_message()
  local lowest = tonumber(redis.call("ZRANGE", ready, 0, 0, "WITHSCORES")[2] or "")
  local entries = preferred >= 0 and lowest and KEYS[streams + preferred]
    and redis.pcall("XRANGE", KEYS[streams + preferred], "-", "+", "COUNT", 20) or {}
  for _, entry in ipairs(entries) do
    local id = entry[2][2]
    local record = read_record(id)
    if record and record.state == "w" then
      local account = tenant_account(record.tenant)
      local ahead = account.tag - lowest
      if account.class == "r" and ahead <= math.max(account.cost or queue.cost, LEAST_COST) / account.limits.weight then
        return account, id, record
      end
    end
  end
end

local function next_message()
  local account, id, record = preferred_message()
  if account then
    return account, id, record
  end
  local tenant = redis.call("ZRANGE", ready, 0, 0)[1] or redis.call("ZRANGE", over, 0, 0)[1]
  if not tenant then
    return nil
  end
  account = tenant_account(tenant)
  local first, member = first_waiting(tenant)
  record = first and read_record(first)
  if record and record.state == "w" then
    return account, first, record
  end
  if member then
    redis.call("ZREM", waiting, member)
  end
  place(account)
  return account
end

local function repeated()
  local last = redis.call("HGET", takes, worker)
  local values = last and cmsgpack.unpack(last)
  if not values or values[1] ~= request then
    return false
  end
  for i = 3, #values do
    local id, record = values[i], read_record(values[i])
    if record and record.state == "l" and record.token == request then
      local payload, headers = read_entry(record)
      reply[#reply + 1] = {id, record.tenant, record.key, record.attempts, string.format("%.0f", record.since),
        string.format("%.0f", record.deadline), payload, headers}
    end
  end
  return true
end

if not repeated() then
  move_due()
  for _ = 1, 2 * count do
    local account, id, record = next_message()
    if not account or #ids >= count then
      break
    end
    if id then
      hand_over(account, id, record)
      if bytes >= most_bytes then
        break
      end
    end
  end
  forget_drained(10)
  if #ids > 0 then
    redis.call("HSET", takes, worker, cmsgpack.pack({request, now, unpack(ids)}))
  end
end

save_accounts()
save_queue()
if moved > #ids and redis.call("EXISTS", ready, over) > 0 then
  notify("m")
end

local function first_due(key)
  return tonumber(redis.call("ZRANGE", key, 0, 0, "WITHSCORES")[2] or "inf") or math.huge
end

local next_due = math.min(first_due(delayed), first_due(leases), first_due(blocked))
local newest = redis.pcall("XREVRANGE", notices, "+", "-", "COUNT", 1)
reply[2], reply[3], reply[5] = queue.streams, not newest.err and newest[1] and newest[1][1] or "0-0", lost
reply[4] = next_due < math.huge and math.max(0, math.ceil(next_due - now)) or -1
return reply
