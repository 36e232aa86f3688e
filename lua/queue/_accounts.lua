-- Shared by the scripts that move messages: tenants' accounts.
-- includes: queue/_limits
--
-- An account holds what is known of a tenant: its tag (see queue/_turns), its messages in flight, the bytes of its messages, what one
-- costs, how many wait, how far its line has got, and the weight with which it is counted among those that wait.  A script reads an account once, and writes it at its end.

local used, fetched, in_order = {}, {}, {}

local function unpack_account(tenant, packed)
  local v = packed and cmsgpack.unpack(packed) or {0, 0, 0, false, 0, 0, false, 0, 0, 0, 0}
  return {
    tenant = tenant, tag = v[1], in_flight = v[2], bytes = v[3], cost = v[4], rank = v[5], next_at = v[6], class = v[7],
    last_rank = v[8], base = v[9], keyless = v[10], waits = v[11], weighs = v[12] or 0,
    limits = has_limits and limits_of(tenant) or NO_LIMITS, line = nil, at = 1, ahead = 0, has_moved = false, keeps_line = nil,
    is_unsaved = false, has_line = false, is_noisy = nil,
  }
end

local function pack_account(a)
  return cmsgpack.pack({
    a.tag, a.in_flight, a.bytes, a.cost, a.rank, a.next_at, a.class, a.last_rank, a.base, a.keyless, a.waits, a.weighs,
  })
end

-- Those that wait apart have a line of their own: see queue/_suspects.
local APART, IS_APART = "\1\1", 2

-- A member of `waiting`: the line in which it waits, if that is not its tenant's own, tenant, rank (28 digits), and id.
local function waiting_member(id, record)
  return (record.suspect == IS_APART and APART .. "\0" or record.held and record.held .. "\0" or "") .. record.tenant .. "\0" .. record.rank .. id
end

-- Id, tenant and rank in a member of `waiting` without its line.
local function parse_waiting(member)
  local tenant = string.match(member, "^%Z*")
  return string.sub(member, #tenant + 30), tenant, tonumber(string.sub(member, #tenant + 2, #tenant + 15), 16)
end

-- Members that have joined or left `waiting`, written together; a tenant's line is read after that.
local joined, left = {}, {}

local function save_lines()
  if #joined > 0 then
    redis.call("ZADD", waiting, unpack(joined))
    joined = {}
  end
  if #left > 0 then
    redis.call("ZREM", waiting, unpack(left))
    left = {}
  end
end

local function join_line(account, member)
  account.is_unsaved, joined[#joined + 1], joined[#joined + 2] = true, 0, member
end

local function quit_line(account, member)
  account.is_unsaved, account.has_line, left[#left + 1] = true, false, member
end

-- The first of an account's waiting messages: id and member of `waiting`.  Several are read at once, the more the
-- more are used, one by one.
local function first_waiting(account)
  if not account.line or (account.at > #account.line and #account.line == account.ahead) then
    if account.is_unsaved then
      save_lines()
      account.is_unsaved = false
    end
    account.ahead, account.at = account.line and math.min(4 * account.ahead, 32) or 2, 1
    account.line = redis.call("ZRANGEBYLEX", waiting, "[" .. account.tenant .. "\0", "(" .. account.tenant .. "\1", "LIMIT", 0,
      account.ahead)
  end
  local member = account.line[account.at]
  if member then
    return (parse_waiting(member)), member
  end
end

-- The messages of a tenant have moved: it may belong elsewhere, and its line has changed.
local function mark_moved(account)
  account.has_moved, account.keeps_line, account.line = true, false, nil
end

-- The tenant may belong elsewhere, though its line is as it was: as long as nothing else is said, it has messages if it is listed.
local function mark_charged(account)
  account.has_moved, account.keeps_line = true, account.keeps_line ~= false
end

-- Reads the accounts of several tenants together, for `tenant_account`.
local function fetch_accounts(tenants)
  local unknown = {}
  for _, tenant in ipairs(tenants) do
    if not used[tenant] and fetched[tenant] == nil then
      unknown[#unknown + 1], fetched[tenant] = tenant, false
    end
  end
  if #unknown > 0 then
    for i, packed in ipairs(redis.call("HMGET", accounts, unpack(unknown))) do
      fetched[unknown[i]] = packed
    end
  end
end

local function tenant_account(tenant)
  local account = used[tenant]
  if not account then
    local packed = fetched[tenant]
    if packed == nil then
      packed = redis.call("HGET", accounts, tenant)
    end
    account = unpack_account(tenant, packed)
    used[tenant], in_order[#in_order + 1], fetched[tenant] = account, account, nil
    if not packed then
      account.keeps_line = false
      local _, member = first_waiting(account)
      account.rank = member and select(3, parse_waiting(member)) - 1 or 0
    end
  end
  return account
end
