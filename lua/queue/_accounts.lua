-- Shared by the scripts that move messages: tenants' accounts.
-- includes: queue/_limits
--
-- An account holds what is known of a tenant: its tag (see queue/_turns), its messages in flight, the bytes of its messages, what one
-- costs, how many wait, how far its line has got, and the weight with which it is counted among those that wait.  A script reads an account once, and writes it at its end.

local used, fetched, in_order = {}, {}, {}

local function pack_account(account)
  return cmsgpack.pack({
    account.tag, account.in_flight, account.bytes, account.cost, account.rank, account.next_at, account.class, account.last_rank,
    account.base, account.keyless, account.waits, account.weighs,
  })
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
  account.is_unsaved, left[#left + 1] = true, member
end

-- The first of an account's waiting messages: id and member of `waiting`.  Several are read at once, the more the
-- more are used, one by one.
local function first_waiting(account)
  if not account.line or (account.at > #account.line and #account.line == account.ahead) then
    if account.is_unsaved then
      save_lines()
      account.is_unsaved = false
    end
    account.ahead = account.line and math.min(4 * account.ahead, 32) or 2
    account.line = redis.call("ZRANGEBYLEX", waiting, "[" .. account.tenant .. "\0", "(" .. account.tenant .. "\1", "LIMIT", 0,
      account.ahead)
    account.at = 1
  end
  local member = account.line[account.at]
  if member then
    return string.sub(member, #account.tenant + 30), member
  end
end

-- The messages of a tenant have moved: it may belong elsewhere, and its line has changed.
local function mark_moved(account)
  account.has_moved, account.keeps_line, account.line = true, false, nil
end

-- The tenant may belong elsewhere, though its line is as it was: as long as nothing else is said, it has messages if it is listed.
local function mark_charged(account)
  account.has_moved = true
  if account.keeps_line == nil then
    account.keeps_line = true
  end
end

local function tenant_account(tenant)
  local account = used[tenant]
  if not account then
    local packed = fetched[tenant]
    if packed == nil then
      packed = redis.call("HGET", accounts, tenant)
    end
    fetched[tenant] = nil
    local values = packed and cmsgpack.unpack(packed) or {0, 0, 0, false, 0, 0, false, 0, 0, 0, 0}
    account = {
      tenant = tenant, tag = values[1], in_flight = values[2], bytes = values[3], cost = values[4], rank = values[5],
      next_at = values[6], class = values[7], last_rank = values[8], base = values[9], keyless = values[10],
      waits = values[11], weighs = values[12] or 0, limits = has_limits and limits_of(tenant) or NO_LIMITS,
      line = nil, at = 1, ahead = 0, has_moved = false, keeps_line = nil, is_unsaved = false, is_noisy = nil,
    }
    used[tenant], in_order[#in_order + 1] = account, account
    if not packed then
      account.keeps_line = false
      local _, member = first_waiting(account)
      account.rank = member and tonumber(string.sub(member, #tenant + 2, #tenant + 15), 16) - 1 or 0
    end
  end
  return account
end
