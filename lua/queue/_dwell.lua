-- Counts dwell times: how long messages wait until they are handed over, apart for noisy tenants.
-- includes: queue/_accounts

local held_by_all
local dwells = {}

-- How long the message, which has left its line, has waited, counted by powers of two of a millisecond.  Noisy, as of a noisy
-- neighbour, is a tenant that holds 30 messages, and more than a tenth of the queue.
local function count_dwell(account, record)
  if account.is_noisy == nil then
    local held = account.in_flight + account.waits + 1
    if held >= 30 and not held_by_all then
      held_by_all = redis.call("ZCARD", waiting) + redis.call("ZCARD", leases)
    end
    account.is_noisy = held >= 30 and held * 10 > held_by_all
  end
  local bucket, waited = 0, now - math.max(record.since, record.at)
  while waited > 1 do
    bucket, waited = bucket + 1, waited / 2
  end
  bucket = account.is_noisy and -1 - bucket or bucket
  dwells[bucket] = (dwells[bucket] or 0) + 1
end

local function save_dwells()
  for bucket, count_of in pairs(dwells) do
    local kind = bucket < 0 and "noisy " .. (-1 - bucket) or "quiet " .. bucket
    redis.call("HINCRBY", dwell, math.floor(now / 300000) .. " " .. kind, count_of)
  end
end
