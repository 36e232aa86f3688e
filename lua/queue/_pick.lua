-- Picks the message that is to be handed over next.  Include it after queue/_due.
-- keys: waiting, ready, over, streams...
-- args: count:int, preferred:int

-- The first tenants of `ready`, read together; those of them that were given a message since are in `again`.
local heads, head, is_all = {}, 1, false

local function save_ready()
  local values = {}
  for _, place_of in ipairs(again or {}) do
    local account = used[place_of.tenant]
    if account.class == "r" and account.tag == place_of.tag then
      values[#values + 1], values[#values + 2] = place_of.tag, place_of.tenant
    end
  end
  if #values > 0 then
    redis.call("ZADD", ready, unpack(values))
  end
  again = nil
end

local function read_heads()
  save_ready()
  local found, tenants = redis.call("ZRANGE", ready, 0, count - 1, "WITHSCORES"), {}
  heads, head, again, is_all = {}, 1, {}, #found < 2 * count
  for i = 1, #found, 2 do
    tenants[#tenants + 1] = found[i]
    heads[#heads + 1] = {tenant = found[i], tag = tonumber(found[i + 1])}
  end
  fetch_accounts(tenants)
end

-- The ready tenant whose turn it is, and its tag.  A tenant that has moved since it was read is where it moved to.
local function first_ready()
  if not again then
    read_heads()
  end
  while true do
    if head > #heads and not is_all then
      read_heads()
    end
    local first, second = heads[head], again[1]
    local is_again = second and not (first and precedes(first.tag, first.tenant, second))
    local chosen = is_again and second or first
    local account = chosen and used[chosen.tenant]
    if not chosen then
      return nil
    elseif not account or (account.class == "r" and account.tag == chosen.tag) then
      return chosen.tenant, chosen.tag, is_again
    elseif is_again then
      table.remove(again, 1)
    else
      head = head + 1
    end
  end
end

local function next_ready()
  local tenant, _, is_again = first_ready()
  if is_again then
    table.remove(again, 1)
  elseif tenant then
    head = head + 1
  end
  return tenant
end

-- A message of the preferred stream, if its tenant is at most one message ahead of the one whose turn it is.
local function preferred_message()
  if preferred < 0 then
    return nil
  end
  local _, lowest = first_ready()
  local key = lowest and KEYS[streams + preferred]
  for _, entry in ipairs(key and call_or_nil("XRANGE", key, "-", "+", "COUNT", 20) or {}) do
    local id = entry[2][2]
    local record = read_record(id)
    if record and record.state == "w" then
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
