-- Shared by the scripts that move messages: whose turn it is.
-- includes: queue/_openings
--
-- A tenant with waiting messages is in one of three sets: ready; over (its elastic limit: goes when nobody is ready); blocked
-- (a limit that holds always; the score is the time at which it may go, or infinity).

local SETS = {r = ready, o = over, b = blocked}

-- The set where a tenant belongs, and its score there.
local function classify(account)
  local own, ends = account.limits, limited_until(account)
  if ends then
    return "b", ends
  end
  return (own.elastic and account.in_flight >= own.elastic) and "o" or "r", nil
end

-- Several places are written together; while messages are taken, queue/_ready keeps those of ready tenants.
local placed, keep_ready = nil, nil
-- Puts a tenant where it belongs, after anything about it has changed.
local function place(account)
  local class, score = false, nil
  if account.has_line or account.keeps_line and account.class or not account.keeps_line and first_waiting(account) then
    class, score = classify(account)
  end
  if class and class ~= "b" and account.class ~= "r" and account.class ~= "o" then
    start_turn(account)
  end
  if account.class and account.class ~= class then
    redis.call("ZREM", SETS[account.class], account.tenant)
  end
  if class == "r" and keep_ready then
    keep_ready(account)
  elseif class and placed then
    table.insert(placed[class], score or account.tag)
    table.insert(placed[class], account.tenant)
  elseif class then
    redis.call("ZADD", SETS[class], score or account.tag, account.tenant)
  end
  queue.listed = queue.listed + (class and 1 or 0) - (account.class and 1 or 0)
  local weighs = class and class ~= "b" and account.limits.weight or 0
  queue.weights, account.weighs = math.max(queue.weights + weighs - account.weighs, 0), weighs
  account.class, account.has_moved, account.keeps_line, account.has_line = class, false, nil, false
end

-- Places all tenants of which the messages have moved.
local function place_moved()
  placed = {r = {}, o = {}, b = {}}
  for _, account in ipairs(in_order) do
    if account.has_moved then
      place(account)
    end
  end
  for class, pairs_of in pairs(placed) do
    if #pairs_of > 0 then
      redis.call("ZADD", SETS[class], unpack(pairs_of))
    end
  end
  placed = nil
end

local function is_idle(account)
  return not account.class and account.in_flight <= 0 and account.bytes <= 0 and account.waits <= 0
end

-- Writes what this call has changed: records, gates, and accounts.  The tag of an idle tenant is kept until the virtual time has reached it.
-- Returns whether a gate has admitted a message.
local function save_accounts()
  local has_opened = gating and gating.open()
  save_records()
  save_lines()
  place_moved()
  local values, idle = {}, {}
  for tenant, account in pairs(used) do
    values[#values + 1], values[#values + 2] = tenant, pack_account(account)
    if is_idle(account) then
      idle[#idle + 1], idle[#idle + 2] = account.tag, tenant
    end
  end
  if #values > 0 then
    queue.tenants = queue.tenants + redis.call("HSET", accounts, unpack(values))
  end
  if #idle > 0 then
    redis.call("ZADD", drained, unpack(idle))
  end
  if gating then
    gating.save()
  end
  return has_opened
end
