-- Settle leases: each message is done, or goes back; repeated, it changes nothing.
-- includes: queue/_finish
-- keys: queue/_keys
-- args: items...
-- returns: {"settled", "ok" | "stale", …} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- A lease is 6 arguments: id, token, outcome, delay, seconds, reason.  Outcomes: `done`; `retry` after a delay in milliseconds;
-- `snooze`, the same without counting the attempt; `release`: it was not begun; `dead`.  `seconds` is how long the work took.
-- Stale: the lease has expired and somebody else may have the message, or it was deleted; nothing changes.
-- Cost: O(leases × log messages).

local WIDTH = 6
if is_lost() then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
begin_writing()

local wakes, classes, known = false, {}, {}

-- A dead letter without its body could be redriven, and would be another message.
local function lose(id, record)
  forget(id, record)
  redis.call("ZREM", leases, id)
  delete_record(id)
  known[id] = nil
  redis.call("HINCRBY", meta, "lost", 1)
end

local function go_back(id, record, delay)
  local payload, headers = read_entry(record)
  if delay > 0 and payload then
    park(id, record, "d", now + delay, "", payload, headers)
  else
    put_back(id, record)
  end
  wakes = true
end

local function settle(id, token, outcome, delay, seconds, reason)
  local record = known[id]
  local settled = token .. " " .. outcome
  if record and record.token == settled then
    return "ok"
  elseif not record or record.token ~= token then
    return "stale"
  end
  local account = tenant_account(record.tenant)
  if classes[account] == nil then
    classes[account] = account.class
  end
  mark_charged(account)
  leave_flight(account, record)
  if outcome == "release" then
    correct_charge(account, record, 0)
  else
    end_work(account, record, tonumber(seconds))
  end
  record.token = settled
  if outcome == "done" then
    finish(id, record)
  elseif outcome == "dead" then
    local payload, headers = read_entry(record)
    if payload then
      dead_letter(id, record, reason, payload, headers)
    else
      lose(id, record)
    end
  else
    record.suspect = outcome == "release" and record.suspect or 0
    if outcome ~= "retry" then
      record.attempts = record.attempts - 1
    end
    go_back(id, record, number(delay))
  end
  return "ok"
end

local reply, ids, tenants = {"settled"}, {}, {}
for from = items, #ARGV, WIDTH do
  ids[#ids + 1] = ARGV[from]
end
begin_batch(ids)
for _, id in ipairs(ids) do
  known[id] = read_record(id) or nil
  tenants[#tenants + 1] = known[id] and known[id].tenant
end
fetch_accounts(tenants)
for from = items, #ARGV, WIDTH do
  reply[#reply + 1] = settle(unpack(ARGV, from, from + WIDTH - 1))
end
clear_finished()

forget_finished(2 * #reply)

wakes = save_accounts() or wakes
save_queue()
for account, was in pairs(classes) do
  wakes = wakes or (was ~= "r" and account.class == "r")
end
if wakes then
  wake()
end
return reply
