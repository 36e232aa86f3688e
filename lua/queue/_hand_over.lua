-- Hands messages over, for take.lua, or again those of a call that is repeated.
-- includes: queue/_pick, queue/_dwell
-- args: request, worker, lease:int, beside:int

local expiries = {}
local reply, ids, bytes = {"taken", 0, -1, 0}, {}, 0

local function add_to_reply(id, record, payload, headers)
  reply[#reply + 1] = {id, record.tenant, record.key, record.attempts, string.format("%.0f", record.since),
    string.format("%.0f", record.deadline), payload, headers, record.company == ALONE and 1 or 0}
end

local function take_out_of_line(account, id, record, gate)
  if record.suspect ~= IS_APART then
    return leave_line(account, id, record)
  end
  quit_line(account, waiting_member(id, record))
  if gate then
    gating.leave(gate, record)
  end
end

local function hand_over(account, id, record)
  local gate = gating and gating.find(record)
  if gate and limited_until(gate) then
    return gating.hold_back(account, gate, id, record)
  elseif not may_go(record, #ids == 0) then
    return set_apart(account, id, record)
  end
  take_out_of_line(account, id, record, gate)
  local payload, headers = read_entry(record)
  if not payload then
    lose(id, record)
    return place(account)
  elseif record.deadline > 0 and record.deadline <= now then
    dead_letter(id, record, "its deadline has passed", payload, headers)
    return place(account)
  end
  count_dwell(account, record)
  count_moved(account, id, record)
  record.charge, record.advance = begin_work(account, record.at)
  if gate then
    gating.begin(gate, record.at)
  end
  record.state, record.attempts, record.token, record.taken, record.at = "l", record.attempts + 1, request, now, now
  note_company(record)
  save_record(id, record)
  expiries[#expiries + 1], expiries[#expiries + 2] = now + lease, id
  if record.deadline > 0 then
    redis.call("ZREM", deadlines, id)
  end
  release_unique(id, record, "queued")
  place(account)
  ids[#ids + 1], bytes = id, bytes + record.bytes
  add_to_reply(id, record, payload, headers)
end

local function repeated()
  local last = unpack_take(redis.call("HGET", takes, worker))
  if last.token ~= request then
    return false
  end
  for _, id in ipairs(last.ids) do
    local record = read_record(id)
    if record and record.token == request then
      local payload, headers = read_entry(record)
      add_to_reply(id, record, payload, headers)
    end
  end
  return true
end
