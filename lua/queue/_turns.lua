-- Shared by the scripts that move messages: whose turn it is.  Include it after queue/_accounts.
-- keys: ready, over, blocked, drained, accounts, leases, waiting
--
-- Start-time fair queuing.  A tenant's tag is the virtual time at which its next message starts: seconds of work divided by its
-- weight.  The lowest tag goes first.  `floor` is the tag of the last message that was handed over; a tenant that comes back
-- starts there, and so has no credit for its absence.  A hand-over is charged an estimate, and the end of the lease corrects it.
-- A tenant with waiting messages is in one of three sets: ready; over (its elastic limit: goes when nobody is ready); blocked
-- (a limit that holds always; the score is the time at which it may go, or infinity).

-- Seconds: what handing over costs by itself.
local LEAST_COST = 0.001
local SETS = {r = ready, o = over, b = blocked}
local FOREVER = "+inf"

-- The set where a tenant belongs, and its score there.  Until all leases are counted, a tenant with a limit in flight waits.
local function classify(account)
  local own = account.limits
  if own.paused or (own.in_flight and (is_rebuilding or is_suspect or account.in_flight >= own.in_flight)) then
    return "b", FOREVER
  end
  if own.rate then
    local allowed_at = account.next_at - (own.burst - 1) * 1000 / own.rate
    if allowed_at > now then
      return "b", string.format("%.0f", math.ceil(allowed_at))
    end
  end
  return (own.elastic and account.in_flight >= own.elastic) and "o" or "r", nil
end

-- Several places are written together; while messages are taken, queue/_ready keeps those of ready tenants.
local placed, keep_ready = nil, nil
-- Puts a tenant where it belongs, after anything about it has changed.
local function place(account)
  local class, score = false, nil
  if account.keeps_line and account.class or not account.keeps_line and first_waiting(account) then
    class, score = classify(account)
  end
  if class and class ~= "b" and account.class ~= "r" and account.class ~= "o" then
    account.base = queue.floor
    account.tag = math.max(account.tag, account.base)
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
  account.class, account.has_moved, account.keeps_line = class, false, nil
end

-- Places all tenants of which the messages have moved.
local function place_moved()
  placed = {r = {}, o = {}, b = {}}
  for _, account in pairs(used) do
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

-- What is paid back does not take a tenant behind where it came back last: that would be credit for its absence.
local function charge(account, seconds)
  account.tag = math.max(account.tag + seconds / account.limits.weight, account.base)
end

-- A message of the tenant is handed over; returns what it is charged until its cost is known.
local function begin_work(account)
  queue.floor = math.max(queue.floor, account.tag)
  local estimate = math.max(account.cost or queue.cost, LEAST_COST)
  charge(account, estimate)
  account.in_flight = account.in_flight + 1
  if account.limits.rate then
    account.next_at = math.max(account.next_at, now) + 1000 / account.limits.rate
  end
  return estimate
end

-- A lease of the tenant has ended after so many seconds of work.
local function end_work(account, record, seconds)
  local cost = math.max(math.min(seconds, (now - record.taken) / 1000), LEAST_COST)
  charge(account, cost - record.charge)
  account.cost = account.cost and 0.75 * account.cost + 0.25 * cost or cost
  queue.cost = queue.cost > 0 and 0.9 * queue.cost + 0.1 * cost or cost
end

local function is_idle(account)
  return not account.class and account.in_flight <= 0 and account.bytes <= 0
end

-- Writes what this call has changed: records, and accounts.  The tag of an idle tenant is kept until the floor has reached it.
local function save_accounts()
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
end
