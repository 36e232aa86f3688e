-- The tenants that are ready, in the order of their turns, while messages are taken.
-- includes: queue/_due
-- args: count:int

-- The first tenants of `ready` are read together.  Those that are placed there since are in `reinserted`, in the same order, and
-- are written at the end.
local heads, head, is_all, reinserted = {}, 1, false, {}

local function precedes(turn, other)
  return turn.tag < other.tag or (turn.tag == other.tag and turn.tenant < other.tenant)
end

local function reinsert(account)
  local turn, at = {tag = account.tag, tenant = account.tenant}, #reinserted
  while at > 0 and precedes(turn, reinserted[at]) do
    at = at - 1
  end
  table.insert(reinserted, at + 1, turn)
  account.turn = turn
end

local function take_out()
  local turn = table.remove(reinserted, 1)
  local account = used[turn.tenant]
  if account.turn == turn then
    account.turn = nil
  end
end

local function save_ready()
  local values = {}
  for _, turn in ipairs(reinserted) do
    local account = used[turn.tenant]
    if account.turn == turn then
      account.turn = nil
      if account.class == "r" then
        values[#values + 1], values[#values + 2] = turn.tag, turn.tenant
      end
    end
  end
  if #values > 0 then
    redis.call("ZADD", ready, unpack(values))
  end
  reinserted, keep_ready = {}, nil
end

local function read_heads()
  save_ready()
  local found, tenants = redis.call("ZRANGE", ready, 0, count - 1, "WITHSCORES"), {}
  heads, head, is_all, keep_ready = {}, 1, #found < 2 * count, reinsert
  for i = 1, #found, 2 do
    tenants[#tenants + 1] = found[i]
    heads[#heads + 1] = {tenant = found[i], tag = tonumber(found[i + 1])}
  end
  fetch_accounts(tenants)
end

-- The ready tenant whose turn it is.  One that was read and has moved since is passed over, and taken out if it is not ready: each
-- step gets on, whatever the set holds.
local function first_ready()
  if not keep_ready then
    read_heads()
  end
  while true do
    if head > #heads and not is_all then
      read_heads()
    end
    local first, second = heads[head], reinserted[1]
    local is_reinserted = second and not (first and precedes(first, second))
    local turn = is_reinserted and second or first
    local account = turn and used[turn.tenant]
    if not turn then
      return nil
    elseif is_reinserted and account.turn == turn and account.class == "r" then
      return turn, true
    elseif is_reinserted then
      take_out()
    elseif not account or (account.class == "r" and not account.turn) then
      return turn, false
    else
      head = head + 1
      if account.class ~= "r" then
        redis.call("ZREM", ready, turn.tenant)
      end
    end
  end
end

local function next_ready()
  local turn, is_reinserted = first_ready()
  if is_reinserted then
    take_out()
  elseif turn then
    head = head + 1
  end
  return turn and turn.tenant
end
