-- Shared by the scripts that move messages: gates admit what they hold.  Include it after queue/_gates.
-- keys: messages, waiting, gates, openings
--
-- A gate opens when one of its messages has ended or left; `openings` says when it is to be looked at again otherwise.

if gating then
  -- A message of a tenant that is paused keeps a key from others for so many milliseconds at most; and so many of those that a gate holds
  -- are looked at for the first of a tenant that is not.
  local LOOK_AGAIN, MOST_LOOKS = 10000, 20

  -- Admits as many as there is room for.  If its time has come without any, one that it has admitted counts no longer: its tenant may have
  -- been paused.  What may go is decided when it is handed over.
  local function open_gate(gate)
    local room = gating.room(gate)
    if gate.is_due and room < 1 and not limited_until(gate) then
      gate.admitted = math.max(gate.admitted - 1, 0)
      room = gating.room(gate)
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
      elseif gating.within == "tenant" or not account.limits.paused then
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
    elseif gate.has_opened and gating.room(gate) >= 1 then
      return now
    end
    local again = gating.within == "tenant" and math.huge or now + LOOK_AGAIN
    return gate.opens and gate.opens > now and math.min(gate.opens, again) or again
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
      if opens or gate.waits > 0 or gate.in_flight > 0 or gate.admitted > 0 then
        redis.call("HSET", gates, name, cmsgpack.pack({gate.in_flight, gate.admitted, gate.waits, gate.next_at, gate.rank, opens or 0}))
      else
        redis.call("HDEL", gates, name)
      end
    end
  end
end
