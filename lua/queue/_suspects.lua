-- Suspects: messages whose last lease ended by itself, as when their worker died.
-- includes: queue/_line
-- args: request, worker, beside:int, others:int
--
-- One of the messages that a worker has together may have killed it.  Therefore a worker that isolates (`beside` is how many messages its
-- process has, and not -1) is handed a suspect alone, and takes nothing else until that is settled: then a death is that message's own.
-- A suspect whose turn comes while no worker is idle waits apart (`suspect` is 2, and not 1), in the line APART, and keeps its key's
-- room; one worker is made to become idle for it, the others go on.
-- `company` says how a message was handed over: 1, perhaps beside others; 2, alone; 0, to a reader that does not isolate.  Only a death
-- that was its own counts as an attempt.

local IN_COMPANY, ALONE, DRAINING, LOOKS_APART = 1, 2, 5000, 20
local is_alone = false

-- What a worker took last: the token of the request, when, the messages, and whether their one is all that it has.
local function pack_take(is_only, ids)
  return cmsgpack.pack({request, now, is_only and 1 or 0, unpack(ids)})
end

local function unpack_take(packed)
  local v = packed and cmsgpack.unpack(packed) or {}
  return {token = v[1], at = v[2], is_only = v[3] == 1, ids = {unpack(v, 4)}}
end

-- Whether a lease was its worker's only one: it was handed over alone, and nothing was since.
local function was_only_one(token)
  local holder = string.match(token, "^(.*)/%d+/%d+$")
  local last = unpack_take(holder and redis.call("HGET", takes, holder))
  return last.token == token and last.is_only
end

-- A lease has ended by itself; returns whether the message was alone, as a suspect.
local function suspect_lost(record)
  local company = record.company
  if company == IN_COMPANY and not was_only_one(record.token) then
    record.attempts = record.attempts - 1
  end
  record.suspect, record.company = company == 0 and record.suspect or 1, 0
  return company == ALONE
end

-- Notes how a message that may go is handed over.
local function note_company(record)
  is_alone = beside == 0 and record.suspect > 0
  record.company = beside < 0 and 0 or is_alone and ALONE or IN_COMPANY
  record.suspect = math.min(record.suspect, 1)
end

local function may_go(record, is_first)
  return record.suspect == 0 or beside < 0 or (beside == 0 and is_first)
end

-- The first of those apart that no limit holds.
local function first_apart()
  local start = APART .. "\0"
  for _, member in ipairs(redis.call("ZRANGEBYLEX", waiting, "[" .. start, "(" .. APART .. "\1", "LIMIT", 0, LOOKS_APART)) do
    local own = string.sub(member, #start + 1)
    local id = parse_waiting(own)
    local record = read_record(id)
    if not record or record.suspect ~= IS_APART or record.state ~= "w" then
      redis.call("ZREM", waiting, member)
    else
      local account, gate = tenant_account(record.tenant), gating and gating.find(record)
      if not limited_until(account) and not (gate and limited_until(gate)) then
        return account, id, record
      end
    end
  end
end

-- Whether this worker has to become idle first: one at a time, for as long as it asks.
local function has_to_drain()
  local holder, at = string.match(redis.call("HGET", meta, "draining") or "", "^(.*) (%d+)$")
  if holder and holder ~= worker and now - tonumber(at) < DRAINING then
    return false
  end
  redis.call("HSET", meta, "draining", string.format("%s %.0f", worker, now))
  return true
end

-- Takes a message whose turn it is out of its line.
local function set_apart(account, id, record)
  leave_line(account, id, record)
  local gate = gating and gating.find(record)
  if gate then
    gate.admitted = gate.admitted + 1
  end
  record.suspect, record.held = IS_APART, nil
  save_record(id, record)
  join_line(account, waiting_member(id, record))
  account.line = nil
  place(account)
end
