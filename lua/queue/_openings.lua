-- Shared by the scripts that move messages: gates admit what they hold.
-- includes: queue/_records, queue/_virtual, queue/_gates
--
-- A gate opens when one of its messages has ended or left; `openings` says when it is to be looked at again otherwise.

if gating then
  -- A message that was admitted before its tenant came to a limit keeps a key from others for so many milliseconds at most.  So many
  -- places are looked at for one gate, and so many messages are admitted by one call of a script, since a command takes 4,000 pairs.  All
  -- tenants have been looked at after the second end of the line; then comes a round in which messages are borrowed.
  local LOOK_AGAIN, MOST_LOOKS, moves, BORROWING = 10000, 20, 500, 2

  -- Admits the first message of the tenant whose turn it is, or passes the tenant over.  Returns how much room that takes.
  local function admit(gate, member)
    local own = string.sub(member, #gate.tenant + 2)
    local id, tenant = parse_waiting(own)
    local record, account = read_record(id), tenant_account(tenant)
    local is_barred = gating.bars(account)
    gate.turn = tenant .. "\1"
    if record and is_barred and (gate.ends < BORROWING or not gating.may_borrow(gate, account)) then
      return 0
    end
    gate.waits, moves = gate.waits - 1, moves - 1
    quit_line(gate, member)
    if not record then
      return 0
    end
    gating.admit(gate, record, is_barred)
    gate.has_opened, gate.ends = true, is_barred and gate.ends or 0
    save_record(id, record)
    join_line(account, own)
    mark_moved(account)
    return is_barred and 0 or 1
  end

  -- Whether the last one that a gate has admitted cannot go: its tenant has come to a limit.
  local function is_stuck(gate)
    return gate.turn ~= "" and gating.bars(tenant_account(string.sub(gate.turn, 1, -2)))
  end

  -- Admits as many as there is room for.  One that it has admitted counts no longer if it cannot go, or if its time has come without any.
  -- What may go is decided when it is handed over.  A rebuild has not counted all that is held.
  local function open_gate(gate)
    local room = gating.room(gate)
    if gate.waits > 0 and gate.admitted > 0 and room < 1 and not limited_until(gate) and (gate.is_due or is_stuck(gate)) then
      gate.admitted = gate.admitted - 1
      room = gating.room(gate)
    end
    local looks, line = MOST_LOOKS, gate.tenant .. "\0"
    while gate.waits > 0 and room >= 1 and gate.ends <= BORROWING and not is_rebuilding do
      if looks == 0 or moves <= 0 then
        return
      end
      save_lines()
      local found = redis.call("ZRANGEBYLEX", waiting, "[" .. line .. gate.turn, "(" .. gate.tenant .. "\1", "LIMIT", 0, 1)
      if found[1] then
        room = room - admit(gate, found[1])
      elseif gate.turn == "" then
        gate.waits = 0
      else
        gate.turn, gate.ends = "", gate.ends + 1
      end
      looks = looks - 1
    end
    gate.is_looked_through = room >= 1
    gate.ends = 0
  end

  -- When a gate is to be looked at again, though nothing of it has ended; nil if it is not.
  local function opening_of(gate)
    if gate.waits <= 0 then
      return gate.next_at > now and math.ceil(gate.next_at) or nil
    end
    local ends = is_rebuilding and "+inf" or limited_until(gate)
    if ends then
      return tonumber(ends) or math.huge
    elseif not gate.is_looked_through and gating.room(gate) >= 1 then
      return now
    end
    local at = gating.within ~= "tenant" and gate.admitted + gate.borrowed > 0 and now + LOOK_AGAIN or math.huge
    return gate.opens and gate.opens > now and math.min(gate.opens, at) or at
  end

  -- A message of the gate is handed over.
  function gating.begin(gate, since)
    gate.in_flight = gate.in_flight + 1
    if gate.limits.rate then
      use_rate(gate, since)
    end
  end

  -- Opens the gates of which messages have moved.  Returns whether any message was admitted.
  function gating.open()
    local has_opened = false
    for _, gate in pairs(gating.used) do
      open_gate(gate)
      gate.is_due, has_opened = false, has_opened or gate.has_opened
    end
    return has_opened
  end

  function gating.save()
    for name, gate in pairs(gating.used) do
      local opens = opening_of(gate)
      if opens and opens ~= gate.opens then
        redis.call("ZADD", openings, opens == math.huge and "+inf" or string.format("%.0f", opens), name)
      elseif gate.opens and not opens then
        redis.call("ZREM", openings, name)
      end
      if opens or gate.waits > 0 or gate.in_flight > 0 or gate.admitted > 0 or gate.borrowed > 0 then
        redis.call("HSET", gates, name, gating.pack(gate, opens))
      else
        redis.call("HDEL", gates, name)
      end
    end
  end
end
