-- Shared by the scripts that move messages: virtual time, and what tenants are charged.
-- includes: queue/_accounts
--
-- Start-time fair queuing.  A tenant's (start) tag is the virtual time at which its next message starts: seconds of work divided by its
-- weight.  The lowest tag goes first.  A tenant that comes, or comes back, starts there, and so has no
-- credit for its absence.  The virtual time is at least the tag of the last message that was handed over.  Each hand-over also moves it
-- on, by a part of the work divided by the weights of all that wait.  Otherwise tenants that come once, one after the other, would
-- all start where it is, and a tenant that has just been served would wait for as long as they come.  A hand-over is charged an estimate,
-- and the end of the lease corrects it.

-- Seconds: what handing over costs by itself.
local LEAST_COST = 0.001

-- The part by which hand-overs move the virtual time.  With 1, tenants that come once would get no more than one other tenant.  With a
-- quarter, their messages are the next ones as long as they are less than three quarters of all, and a tenant that has just been served
-- waits for four more of each other one at the most.
local PACE = 0.25

-- A moment: tenants that come at the same virtual time take turns in the order of their coming.
local MOMENT = 0.000001
local last_ready = nil

-- Where a tenant that comes now starts: at the virtual time, but no more than a moment behind all those that are ready.
local function start_turn(account)
  last_ready = last_ready or tonumber(redis.call("ZREVRANGE", ready, 0, 0, "WITHSCORES")[2]) or math.huge
  if last_ready < queue.virtual_time then
    account.base = last_ready + MOMENT
  else
    account.base = queue.virtual_time
    queue.virtual_time = queue.virtual_time + MOMENT
  end
  account.tag = math.max(account.tag, account.base)
  last_ready = math.max(last_ready < math.huge and last_ready or account.tag, account.tag)
end

-- What is paid back does not take a tenant behind where it came back last: that would be credit for its absence.
local function charge(account, seconds)
  account.tag = math.max(account.tag + seconds / account.limits.weight, account.base)
end

-- What is handed over late, although it waited, was due when it might first go: otherwise each delay of a reader would lower the rate.
-- Only so many milliseconds are made up for, and none after a pause.
local MADE_UP, PAUSE = 250, 1000

-- Moves on the time at which a tenant or a key may go again: a message, which waits since `since`, is handed over.
local function use_rate(account, since)
  local late = now - account.next_at
  if late > 0 then
    local is_due = since <= account.next_at and late <= PAUSE
    account.next_at = now - (is_due and math.min(late, MADE_UP) or 0)
  end
  account.next_at = account.next_at + 1000 / account.limits.rate
end

-- A message of the tenant is handed over; returns what it is charged until its cost is known, and how far that moves the virtual time.
local function begin_work(account, since)
  local estimate = math.max(account.cost or queue.cost, LEAST_COST)
  local advance = PACE * estimate / (queue.weights + account.limits.weight)
  queue.virtual_time = math.max(queue.virtual_time, account.tag) + advance
  charge(account, estimate)
  account.in_flight = account.in_flight + 1
  if account.limits.rate then
    use_rate(account, since)
  end
  return estimate, advance
end

-- The work of a lease was another than it was charged.
local function correct_charge(account, record, cost)
  charge(account, cost - record.charge)
  if record.charge > 0 then
    queue.virtual_time = queue.virtual_time + record.advance * (cost / record.charge - 1)
  end
end

-- A lease of the tenant has ended after so many seconds of work.
local function end_work(account, record, seconds)
  local cost = math.max(math.min(seconds, (now - record.taken) / 1000), LEAST_COST)
  correct_charge(account, record, cost)
  account.cost = account.cost and 0.75 * account.cost + 0.25 * cost or cost
  queue.cost = queue.cost > 0 and 0.9 * queue.cost + 0.1 * cost or cost
end
