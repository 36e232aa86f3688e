-- Take messages: the next of the tenants whose turn it is, each under a lease; repeated, it returns the same.
-- includes: queue/_hand_over, queue/_declared
-- keys: queue/_keys
-- args: declared, request, worker, lease:int, count:int, most_bytes:int, preferred:int, beside:int, others:int
-- returns: {"taken", streams, wait, lost, {id, tenant, key, attempts, since, deadline, payload, headers, is_alone}, …}
--   | {"undeclared"} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- `request` is the token of the leases.  `wait` is the time in milliseconds until something is due, 0 if there is more to take, or -1.  `lost` counts messages whose bodies are gone, and which are therefore forgotten.
-- `beside` is how many messages the worker's process has, and `others` 1 if it may be handed some by another call than this: see
-- queue/_suspects.  `is_alone` is 1 of a message beside which it is to take no other.
-- First, whatever is due moves on: delayed messages, leases that have expired, tenants that may go again; 100 of each at most.
-- Cost: O((count + 300) × log messages).

if is_undeclared() then
  return {"undeclared"}
elseif is_lost(true) then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
begin_writing()
begin_batch({})

-- So many tenants and messages are looked at: some may be late, lost or paused.
local looks, is_draining = count + STEP, false
if not repeated() then
  move_due()
  if beside >= 0 then
    local account, id, record = first_apart()
    if id and beside == 0 then
      hand_over(account, id, record)
    end
    is_draining = id and beside > 0 and has_to_drain()
  end
  while not is_alone and not is_draining and #ids < count and bytes < most_bytes and looks > 0 do
    local account, id, record = next_message()
    if not account then
      break
    end
    if id then
      hand_over(account, id, record)
    end
    looks = looks - 1
  end
  save_dwells()
  save_lines()
  if #ids > 0 then
    redis.call("ZADD", leases, unpack(expiries))
  end
  forget_drained(count + 10, #ids > 0)
  if #ids > 0 then
    local is_only = #ids == 1 and beside == 0 and (is_alone or others == 0)
    redis.call("HSET", takes, worker, pack_take(is_only, ids))
  end
end

save_accounts()
save_ready()
save_queue()
-- Asked for in any case: a key of another type would otherwise show only when a message is written.
local is_woken, is_left = redis.call("LLEN", wakes) > 0, redis.call("EXISTS", ready, over) > 0
if is_left and not is_woken and not is_draining then
  redis.call("LPUSH", wakes, "1")
end

local function first_due(key)
  return tonumber(redis.call("ZRANGE", key, 0, 0, "WITHSCORES")[2] or "inf") or math.huge
end

local next_due = math.min(first_due(delayed), first_due(leases), first_due(blocked), gating and first_due(openings) or math.huge)
if is_draining then
  next_due = math.min(next_due, now + 50)
end
reply[2], reply[4] = queue.streams, lost
if looks == 0 or (is_left and #reply > 4) then
  next_due = now
end
reply[3] = next_due < math.huge and math.max(0, math.ceil(next_due - now)) or -1
return reply
