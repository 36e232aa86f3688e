-- Shared by the scripts that move messages: limits of keys.  Include it after queue/_lanes.
-- keys: meta, messages, waiting, limits, lanes, gates, openings
--
-- A gate holds what is known of a key while a queue limits keys: how many of its messages are in flight, how many it has admitted to their
-- tenants' lines, and when the next may go.  It admits no more than may go; all others it holds, in a line of its own in `waiting`, so
-- that those whose turn it is can go, and a tenant's line is not full of what cannot.  In a gate's line tenants take turns, as keys do
-- in a tenant's.  `openings` says when a gate is to be looked at again; what ends does so before.
--
-- `gating` is nil in a queue that limits no keys: each call of a script makes closures of all its functions, and of these only where they
-- are used.

-- Until when a tenant or a key is at a limit; nil if it is at none.  Its time to go may be of before the clock was set back.
-- Until all leases are counted, one with a limit in flight waits.
local function limited_until(account)
  local own = account.limits
  if own.paused or (own.in_flight and (is_rebuilding or is_suspect or account.in_flight >= own.in_flight)) then
    return "+inf"
  end
  if own.rate then
    account.next_at = math.min(account.next_at, now + own.burst * 1000 / own.rate)
    local allowed_at = account.next_at - (own.burst - 1) * 1000 / own.rate
    if allowed_at > now then
      return string.format("%.0f", math.ceil(allowed_at))
    end
  end
end

-- In `limits`: where keys are limited, in the whole queue or within each tenant, and before the name of a key that has limits.
local WITHIN, LIMITED = DECLARED .. "\0\0", DECLARED .. "\0"

local gating, of_keys = nil, has_limits and redis.call("HMGET", limits, WITHIN, LIMITED)
if of_keys and of_keys[1] then
  local within, all_keys, gates_used = of_keys[1], of_keys[2], {}
  gating = {within = within}

  -- A message of a tenant that is paused keeps a key from others for so many milliseconds at most; and so many of those that a gate holds
  -- are looked at for the first of a tenant that is not.
  local LOOK_AGAIN, MOST_LOOKS = 10000, 20

  function gating.named(name)
    local gate = gates_used[name]
    if not gate then
      local packed = redis.call("HGET", gates, name)
      local values = packed and cmsgpack.unpack(packed) or {0, 0, 0, 0, 0, 0}
      local own = redis.call("HGET", limits, LIMITED .. string.match(name, "[^\1]+$"))
      gate = {
        tenant = name, is_gate = true, in_flight = values[1], admitted = values[2], waits = values[3], next_at = values[4],
        rank = values[5], opens = values[6] ~= 0 and values[6] or nil, limits = parse_limits(own or all_keys),
      }
      gates_used[name] = gate
    end
    return gate
  end

  -- The gate of a message; nil if its queue limits no keys, or it has none.
  function gating.find(record)
    local key = string.match(record.key, "^\1.(.*)$") or record.key
    return key ~= "" and gating.named("\1" .. (within == "tenant" and record.tenant .. "\1" or "") .. key) or nil
  end

  -- How many messages of the gate could go now, beside those that it has admitted.
  local function room_of(gate)
    local own, room = gate.limits, math.huge
    if limited_until(gate) then
      return 0
    end
    if own.in_flight then
      room = own.in_flight - gate.in_flight
    end
    if own.rate then
      room = math.min(room, own.burst - math.max(0, gate.next_at - now) * own.rate / 1000 + 0.000001)
    end
    return math.floor(room) - gate.admitted
  end

  function gating.hold_at(gate, record, rank)
    record.held = gate.tenant .. "\0" .. string.format(PADDING, rank) .. string.sub(record.rank, 15)
  end

  -- Admits a message to its tenant's line, which it is about to join, or holds it; one that `was_admitted` before those that it holds.
  function gating.pass(record, was_admitted)
    local gate = gating.find(record)
    record.held = nil
    if not gate then
      return
    elseif room_of(gate) >= 1 and (was_admitted or gate.waits == 0) then
      gate.admitted = gate.admitted + 1
    elseif was_admitted then
      local last, waits = read_lane(gate, record)
      save_lane(gate, record, last, waits + 1)
      gate.waits = gate.waits + 1
      gating.hold_at(gate, record, 0)
    else
      gating.hold_at(gate, record, next_rank(gate, record))
    end
  end

  -- A message leaves the tenant's line, or that of its gate.
  function gating.leave(gate, record)
    if gate and record.held then
      local last, waits = read_lane(gate, record)
      save_lane(gate, record, last, waits - 1)
      gate.waits = gate.waits - 1
      gate.rank = math.max(gate.rank, tonumber(string.sub(record.held, -28, -15), 16))
    elseif gate then
      gate.admitted = math.max(gate.admitted - 1, 0)
    end
  end

  -- A message of the gate is handed over.
  function gating.begin(gate)
    gate.in_flight = gate.in_flight + 1
    if gate.limits.rate then
      gate.next_at = math.max(gate.next_at, now) + 1000 / gate.limits.rate
    end
  end

  -- Admits as many as there is room for.  If its time has come without any, one that it has admitted counts no longer: its tenant may have
  -- been paused.  What may go is decided when it is handed over.
  local function open_gate(gate)
    local room = room_of(gate)
    if gate.is_due and room < 1 and not limited_until(gate) then
      gate.admitted = math.max(gate.admitted - 1, 0)
      room = room_of(gate)
    end
    if gate.waits <= 0 or room < 1 then
      return
    end
    save_lines()
    local members = redis.call("ZRANGEBYLEX", waiting, "[" .. gate.tenant .. "\0", "(" .. gate.tenant .. "\1", "LIMIT", 0, MOST_LOOKS)
    gate.waits = #members > 0 and gate.waits or 0
    for _, member in ipairs(members) do
      if room < 1 then
        break
      end
      local id = string.sub(member, #gate.tenant + 30)
      local record = read_record(id)
      local account = record and tenant_account(record.tenant)
      if not record then
        quit_line(gate, member)
      elseif within == "tenant" or not account.limits.paused then
        gating.leave(gate, record)
        record.held, room, gate.admitted, gate.has_opened = nil, room - 1, gate.admitted + 1, true
        save_record(id, record)
        quit_line(gate, member)
        join_line(account, record.tenant .. "\0" .. record.rank .. id)
        mark_moved(account)
      end
    end
  end

  -- When a gate is to be looked at again, though nothing of it has ended; nil if it is not.
  local function opening_of(gate)
    if gate.waits <= 0 then
      return gate.next_at > now and math.ceil(gate.next_at) or nil
    end
    local ends = limited_until(gate)
    if ends then
      return tonumber(ends) or math.huge
    elseif gate.has_opened and room_of(gate) >= 1 then
      return now
    end
    local again = within == "tenant" and math.huge or now + LOOK_AGAIN
    return gate.opens and gate.opens > now and math.min(gate.opens, again) or again
  end

  -- Opens the gates of which messages have moved.  Returns whether any message was admitted.
  function gating.open()
    local has_opened = false
    for _, gate in pairs(gates_used) do
      open_gate(gate)
      gate.is_due, has_opened = false, has_opened or gate.has_opened
    end
    return has_opened
  end

  function gating.save()
    for name, gate in pairs(gates_used) do
      local opens = opening_of(gate)
      if opens and opens ~= gate.opens then
        redis.call("ZADD", openings, opens == math.huge and "+inf" or string.format("%.0f", opens), name)
      elseif gate.opens and not opens then
        redis.call("ZREM", openings, name)
      end
      if opens or gate.waits > 0 or gate.in_flight > 0 or gate.admitted > 0 then
        redis.call("HSET", gates, name, cmsgpack.pack({gate.in_flight, gate.admitted, gate.waits, gate.next_at, gate.rank, opens or 0}))
      else
        redis.call("HDEL", gates, name)
      end
    end
  end
end
