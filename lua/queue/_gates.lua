-- Shared by the scripts that move messages: limits of keys.
-- includes: queue/_accounts
--
-- A gate holds what is known of a key while a queue limits keys: how many of its messages are in flight, how many it has admitted to their
-- tenants' lines, and when the next may go.  It admits no more than may go; all others it holds, in a line of its own in `waiting`, so
-- that those whose turn it is can go, and a tenant's line is not full of what cannot.  In a gate's line tenants take turns, and each
-- tenant's messages are in the order of its own line.  A tenant that is paused, or at a limit of its own, is passed over.  Borrowed
-- messages are some of those of tenants at a limit: they are in their tenants' lines, and take no room of the gate.
--
-- `gating` is nil in a queue that limits no keys: each call of a script makes closures of all its functions, and of these only where they
-- are used.

-- Until when a tenant or a key is at a limit; nil if it is at none.  Its time to go may be of before the clock was set back.
-- Until all leases are counted, one with a limit in flight waits; and one with a rate until that begins, which forgets what was used of it.
local function limited_until(account)
  local own = account.limits
  if own.paused or (own.rate and is_suspect) or (own.in_flight and (is_rebuilding or is_suspect or account.in_flight >= own.in_flight)) then
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

  function gating.unpack(name, packed)
    local v = packed and cmsgpack.unpack(packed) or {0, 0, 0, 0, 0, 0, "", 0}
    local own = redis.call("HGET", limits, LIMITED .. string.match(name, "[^\1]+$"))
    return {
      tenant = name, in_flight = v[1], admitted = v[2], waits = v[3], next_at = v[4], borrowed = v[5],
      opens = v[6] ~= 0 and v[6] or nil, turn = v[7], ends = v[8], limits = parse_limits(own or all_keys),
    }
  end

  function gating.pack(g, opens)
    return cmsgpack.pack({g.in_flight, g.admitted, g.waits, g.next_at, g.borrowed, opens or 0, g.turn, g.ends})
  end

  function gating.named(name)
    gating.used[name] = gating.used[name] or gating.unpack(name, redis.call("HGET", gates, name))
    return gating.used[name]
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

  -- Whether others go before a tenant.  Where keys are limited within each tenant, there are none.
  function gating.bars(account)
    return within ~= "tenant" and limited_until(account) ~= nil
  end

  -- Whether the line of a tenant that is barred may borrow a message; a hundred of a gate at most.
  function gating.may_borrow(gate, account)
    return not account.limits.paused and gate.borrowed < 100
  end

  function gating.hold(gate, record)
    record.held, gate.waits = gate.tenant, gate.waits + 1
  end

  -- Admits a message; if its tenant is barred, the line borrows it.
  function gating.admit(gate, record, is_barred)
    if is_barred then
      record.held, gate.borrowed = false, gate.borrowed + 1
    else
      record.held, gate.admitted, gate.turn = nil, gate.admitted + 1, record.tenant .. "\1"
    end
  end

  -- Lets a message into its tenant's line, which it is about to join, or holds it; one that `was_admitted` before those that it holds.
  function gating.pass(record, was_admitted)
    local gate, account = gating.find(record), tenant_account(record.tenant)
    local is_barred = gate and gating.bars(account)
    record.held = nil
    if gate and gating.room(gate) >= 1 and (was_admitted or gate.waits == 0) and (not is_barred or gating.may_borrow(gate, account)) then
      gating.admit(gate, record, is_barred)
    elseif gate then
      gating.hold(gate, record)
    end
  end

  -- A message leaves the tenant's line, or that of its gate.
  function gating.leave(gate, record)
    if gate then
      local count = record.held and "waits" or record.held == false and "borrowed" or "admitted"
      gate[count] = math.max(gate[count] - 1, 0)
    end
  end
end
