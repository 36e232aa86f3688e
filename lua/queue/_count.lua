-- Counts messages by their bodies, for rebuild.lua.
-- includes: queue/_moves

local NEW_LEASE, lost = 30000, 0

-- A message is held where it was before; another goes through its gate, or is held there.
local function count_gate(record)
  local gate = gating and gating.find(record)
  if gate and record.held then
    gating.hold(gate, record)
  elseif gate then
    gating.pass(record, true)
  else
    record.held = nil
  end
end

-- Counts a message for its tenant, once in a generation.
local function count(id, record)
  if record.state ~= "x" then
    redis.call("ZADD", ages, record.since, id)
    if record.unique ~= "" and (record.scope ~= "queued" or record.state ~= "l") then
      redis.call("HSETNX", uniques, record.unique, id)
    end
  end
  if record.generation == queue.generation then
    return
  end
  local account = tenant_account(record.tenant)
  record.generation, record.suspect = queue.generation, math.min(record.suspect, 1)
  if record.state == "w" then
    count_gate(record)
  end
  save_record(id, record)
  if record.state ~= "x" then
    account.bytes = account.bytes + record.bytes
  end
  if record.state == "l" then
    account.in_flight = account.in_flight + 1
    local gate = gating and gating.find(record)
    if gate then
      gate.in_flight = gate.in_flight + 1
    end
    -- Its line has got so far: what joins it now comes behind this message, which may go back.
    account.rank = math.max(account.rank, rank_of(record))
  end
  if record.state == "w" then
    join_lane(account, record)
  end
  mark_moved(account)
end

-- The entry of a stream belongs to a message that waits or is leased; any other is left over.
local function count_entry(stream, entry)
  local id, _, _, packed = unpack_entry(entry)
  local record = read_record(id)
  if not record and packed then
    record = unpack_body(packed)
    record.state, record.stream, record.entry = "w", stream, entry[1]
    if redis.call("HEXISTS", parked, id) == 1 then
      record = nil
    end
  end
  if not record or record.stream ~= stream or record.entry ~= entry[1] or (record.state ~= "w" and record.state ~= "l") then
    redis.call("XDEL", KEYS[streams + stream], entry[1])
    return
  end
  if record.state == "w" then
    local member = waiting_member(id, record)
    redis.call("ZADD", waiting, 0, member)
    watch_deadline(id, record)
    count(id, record)
    if waiting_member(id, record) ~= member then
      redis.call("ZREM", waiting, member)
      redis.call("ZADD", waiting, 0, waiting_member(id, record))
    end
  else
    redis.call("ZADD", leases, "NX", string.format("%.0f", now + NEW_LEASE), id)
    count(id, record)
  end
end

local function count_parked(id)
  local record = read_record(id) or unpack_body((select(4, read_parked(id))))
  if record.state ~= "d" and record.state ~= "x" then
    redis.call("HDEL", parked, id)
    return
  end
  redis.call("ZADD", record.state == "d" and delayed or dead, string.format("%.0f", record.at), parked_member(id, record))
  if record.state == "d" then
    watch_deadline(id, record)
  end
  save_record(id, record)
  count(id, record)
end

-- A record without a body is of a message that is lost.
local function check_record(id, record)
  if record.state == "f" then
    redis.call("ZADD", finished, "NX", string.format("%.0f", record.at), id)
  elseif (record.state == "d" or record.state == "x") and redis.call("HEXISTS", parked, id) == 0
    or (record.state == "w" or record.state == "l") and not read_entry(record) then
    if record.state == "l" then
      leave_flight(tenant_account(record.tenant), record)
    end
    forget(id, record)
    redis.call("HDEL", messages, id)
    lost = lost + 1
  end
end

-- Removes a member of a line that does not wait there.  In the line of a gate, the gate comes before the tenant.
local function check_member(member)
  local own = string.match(member, "^\1%Z*%z(.*)$") or member
  local id = parse_waiting(own)
  local record = read_record(id)
  if not record or record.state ~= "w" or waiting_member(id, record) ~= member then
    redis.call("ZREM", waiting, member)
  end
end
