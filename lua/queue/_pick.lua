-- Picks the message that is to be handed over next.
-- includes: queue/_ready
-- args: preferred:int

-- A message of the preferred stream, if its tenant is at most one message ahead of the one whose turn it is.
local function preferred_message()
  if preferred < 0 then
    return nil
  end
  local turn = first_ready()
  local lowest = turn and turn.tag
  local key = lowest and KEYS[streams + preferred]
  for _, entry in ipairs(key and call_or_nil("XRANGE", key, "-", "+", "COUNT", 20) or {}) do
    local id = unpack_entry(entry)
    local record = read_record(id)
    if record and record.state == "w" and not record.held then
      local account = tenant_account(record.tenant)
      local ahead = account.tag - lowest
      if account.class == "r" and classify(account) == "r" and ahead <= math.max(account.cost or queue.cost, LEAST_COST) / account.limits.weight then
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
  local tenant = next_ready() or redis.call("ZRANGE", over, 0, 0)[1]
  if not tenant then
    return nil
  end
  account = tenant_account(tenant)
  if classify(account) ~= account.class then
    -- The limits of all tenants have changed, or accounts are lost, and with them where the tenant was.
    place(account)
    if account.class == "b" then
      redis.call("ZREM", ready, tenant)
      redis.call("ZREM", over, tenant)
    end
    return account
  end
  local first, member = first_waiting(account)
  record = first and read_record(first)
  if record and record.state == "w" then
    return account, first, record
  end
  if member then
    redis.call("ZREM", waiting, member)
    account.line = nil
  end
  place(account)
  return account
end

if gating then
  -- The limit of its key was lowered after it was admitted, or leases are being counted: it must not be in the way of others.
  function gating.hold_back(account, gate, id, record)
    quit_line(account, waiting_member(id, record))
    if record.generation == queue.generation then
      gating.leave(gate, record)
    else
      join_lane(account, record)
      count_moved(account, id, record)
    end
    gating.pass(record, true)
    save_record(id, record)
    join_line(gate, waiting_member(id, record))
    account.line = nil
    place(account)
  end
end
