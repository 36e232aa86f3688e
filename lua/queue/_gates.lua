-- Shared by the scripts that move messages: limits of keys.  Include it after queue/_lanes.
-- keys: meta, messages, waiting, limits, lanes, gates
--
-- A gate holds what is known of a key while a queue limits keys: how many of its messages are in flight, how many it has admitted to their
-- tenants' lines, and when the next may go.  It admits no more than may go; all others it holds, in a line of its own in `waiting`, so
-- that those whose turn it is can go, and a tenant's line is not full of what cannot.  In a gate's line tenants take turns, as keys do
-- in a tenant's.
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
  local within, all_keys = of_keys[1], of_keys[2]
  gating = {within = within, used = {}}

  function gating.named(name)
    local gate = gating.used[name]
    if not gate then
      local packed = redis.call("HGET", gates, name)
      local values = packed and cmsgpack.unpack(packed) or {0, 0, 0, 0, 0, 0}
      local own = redis.call("HGET", limits, LIMITED .. string.match(name, "[^\1]+$"))
      gate = {
        tenant = name, is_gate = true, in_flight = values[1], admitted = values[2], waits = values[3], next_at = values[4],
        rank = values[5], opens = values[6] ~= 0 and values[6] or nil, limits = parse_limits(own or all_keys),
      }
      gating.used[name] = gate
    end
    return gate
  end

  -- The gate of a message; nil if its queue limits no keys, or it has none.
  function gating.find(record)
    local key = string.match(record.key, "^\1.(.*)$") or record.key
    return key ~= "" and gating.named("\1" .. (within == "tenant" and record.tenant .. "\1" or "") .. key) or nil
  end

  -- How many messages of the gate could go now, beside those that it has admitted.
  function gating.room(gate)
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

  local function place_in_line(gate, record, rank)
    return gate.tenant .. "\0" .. string.format(PADDING, rank) .. string.sub(record.rank, 15)
  end

  -- Holds a message that has this rank already.
  function gating.hold_at(gate, record, rank)
    local last, waits = read_lane(gate, record)
    save_lane(gate, record, math.max(last, rank), waits + 1)
    gate.waits = gate.waits + 1
    record.held = place_in_line(gate, record, rank)
  end

  -- Admits a message to its tenant's line, which it is about to join, or holds it; one that `was_admitted` before those that it holds.
  function gating.pass(record, was_admitted)
    local gate = gating.find(record)
    record.held = nil
    if not gate then
      return
    elseif gating.room(gate) >= 1 and (was_admitted or gate.waits == 0) then
      gate.admitted = gate.admitted + 1
    elseif was_admitted then
      gating.hold_at(gate, record, 0)
    else
      record.held = place_in_line(gate, record, next_rank(gate, record))
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
end
