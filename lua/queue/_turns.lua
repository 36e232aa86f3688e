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

-- The places of several tenants are written together.  While messages are taken, tenants that stay ready are here, in their order.
local placed, again = nil, nil

local function precedes(tag, tenant, other)
  return tag < other.tag or (tag == other.tag and tenant < other.tenant)
end

local function take_place_again(account)
  local at = #again
  while at > 0 and precedes(account.tag, account.tenant, again[at]) do
    at = at - 1
  end
  table.insert(again, at + 1, {tag = account.tag, tenant = account.tenant})
end

-- Puts a tenant where it belongs, after anything about it has changed.
local function place(account)
  local class, score = false, nil
  local has_waiting = account.keeps_line and account.class or not account.keeps_line and first_waiting(account)
  if has_waiting then
    class, score = classify(account)
  end
  if class and class ~= "b" and account.class ~= "r" and account.class ~= "o" then
    account.base = queue.floor
    account.tag = math.max(account.tag, account.base)
  end
  if account.class and account.class ~= class then
    redis.call("ZREM", SETS[account.class], account.tenant)
  end
  if class == "r" and again then
    take_place_again(account)
  elseif class and placed then
    local pairs_of = placed[class]
    pairs_of[#pairs_of + 1], pairs_of[#pairs_of + 2] = score or account.tag, account.tenant
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
    values[#values + 1], values[#values + 2] = tenant, cmsgpack.pack({
      account.tag, account.in_flight, account.bytes, account.cost, account.rank, account.next_at, account.class,
      account.last_rank, account.base, account.keyless, account.waits,
    })
    if is_idle(account) then
      idle[#idle + 1], idle[#idle + 2] = account.tag, tenant
    end
  end
  if #values > 0 then
    redis.call("HSET", accounts, unpack(values))
  end
  if #idle > 0 then
    redis.call("ZADD", drained, unpack(idle))
  end
end
