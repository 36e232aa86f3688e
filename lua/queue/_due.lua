-- What falls due moves on: delayed messages, leases that have expired, tenants and keys that may go again.
-- includes: queue/_moves, queue/_suspects

local STEP, MOST_PAUSE = 100, 300000

local function due(key)
  return redis.call("ZRANGEBYSCORE", key, "-inf", string.format("%.0f", now), "LIMIT", 0, STEP)
end

local lost = 0

-- A message of which the body is gone: deleted by hand, or with a stream whose key was overwritten.
local function lose(id, record)
  local account = forget(id, record)
  redis.call("ZREM", leases, id)
  redis.call("ZREM", delayed, parked_member(id, record))
  delete_record(id)
  redis.call("HINCRBY", meta, "lost", 1)
  mark_moved(account)
  lost = lost + 1
end

-- A lease has ended by itself: nobody knows why.  A message that was alone in its worker again is handed over after a pause that grows.
local function give_up_lease(id, record)
  local was_alone = suspect_lost(record)
  local payload, headers
  if was_alone then
    payload, headers = read_entry(record)
  end
  record.token = ""
  if payload then
    local pause = math.min(1000 * 2 ^ math.min(record.attempts - 1, 20), MOST_PAUSE)
    park(id, record, "d", now + pause * (0.5 + (now + record.order) % 1000 / 2000), "", payload, headers)
  else
    put_back(id, record)
  end
end

local function move_due()
  for _, member in ipairs(due(delayed)) do
    local id = parked_id(member)
    local record = read_record(id)
    local is_back = record and unpark(id, record)
    if is_back == false then
      -- Its body stays where it is.
      redis.call("ZADD", delayed, now + 1000, member)
    elseif not is_back then
      if record then lose(id, record) end
      redis.call("ZREM", delayed, member)
    end
  end
  for _, id in ipairs(due(leases)) do
    local record = read_record(id)
    if record and record.state == "l" then
      local account = tenant_account(record.tenant)
      leave_flight(account, record)
      end_work(account, record, (now - record.taken) / 1000)
      give_up_lease(id, record)
      redis.call("HINCRBY", meta, "reclaimed", 1)
    end
    redis.call("ZREM", leases, id)
  end
  for _, tenant in ipairs(due(blocked)) do
    tenant_account(tenant).has_moved = true
  end
  for _, name in ipairs(gating and due(openings) or {}) do
    local gate = gating.named(name)
    gate.is_due, gate.opens = true, -1
  end
  if gating then
    gating.open()
  end
  place_moved()
end

-- Forgets idle tenants that have nothing left to pay.
local function forget_drained(limit, is_busy)
  if not is_busy and redis.call("ZCARD", drained) > 0 and redis.call("EXISTS", waiting, leases) == 0 then
    queue.virtual_time = math.max(queue.virtual_time, number(redis.call("ZREVRANGE", drained, 0, 0, "WITHSCORES")[2]))
  end
  local paid, forgotten, listed = redis.call("ZRANGEBYSCORE", drained, "-inf", queue.virtual_time, "LIMIT", 0, limit), {}, {}
  fetch_accounts(paid)
  for _, tenant in ipairs(paid) do
    local account = not used[tenant] and tenant_account(tenant)
    -- One that has used up its rate is remembered until its time has come.
    if account and (not is_idle(account) or account.next_at <= now) then
      listed[#listed + 1] = tenant
      forgotten[#forgotten + 1] = is_idle(account) and tenant or nil
    end
    if account then
      used[tenant] = nil
    end
  end
  if #forgotten > 0 then
    queue.tenants = queue.tenants - redis.call("HDEL", accounts, unpack(forgotten))
  end
  if #listed > 0 then
    redis.call("ZREM", drained, unpack(listed))
  end
end
