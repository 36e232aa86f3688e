-- Shared by the scripts that move messages: the line of each tenant.
-- includes: queue/_bodies, queue/_turns, queue/_lanes

local function watch_deadline(id, record)
  if record.deadline > 0 then
    redis.call("ZADD", deadlines, record.deadline, id)
  end
end

-- A message that waits again where it was, or that a rebuild has met.
local function join_lane(account, record)
  local last, waits = read_lane(account, record)
  save_lane(account, record, math.max(last, rank_of(record)), waits + 1)
  account.waits = account.waits + 1
end

-- Appends the body to a stream, and lines the message up.  Returns false if no stream can be written.
local function enqueue(id, record, payload, headers)
  local stream = choose_stream(record.hand)
  if not stream then
    return false
  end
  local account = tenant_account(record.tenant)
  queue.sequence = queue.sequence + 1
  record.rank = string.format(PADDING .. PADDING, next_rank(account, record), queue.sequence)
  -- It may have waited at a gate before it was parked, and keys may have no limits now.
  record.held = nil
  if gating then
    gating.pass(record, false)
  end
  record.state, record.stream, record.at = "w", stream, now
  lengths[stream] = lengths[stream] + 1
  record.entry = add_entry(id, record, payload, headers)
  save_record(id, record)
  join_line(account, waiting_member(id, record))
  mark_moved(account)
  account.has_line = account.has_line or not (record.held or record.suspect == IS_APART)
  return true
end

-- Puts a message that was handed over back where it was in its tenant's line.
local function put_back(id, record)
  local account = tenant_account(record.tenant)
  mark_moved(account)
  if record.generation == queue.generation then
    join_lane(account, record)
    if gating then
      gating.pass(record, true)
    end
  end
  record.state, record.at = "w", now
  save_record(id, record)
  join_line(account, waiting_member(id, record))
  redis.call("ZREM", leases, id)
  watch_deadline(id, record)
end

-- Takes the message whose turn it is out of its tenant's line, which has got so far.
local function leave_line(account, id, record)
  local member = waiting_member(id, record)
  quit_line(account, member)
  if account.line and account.line[account.at] == member then
    account.at = account.at + 1
  else
    account.line = nil
  end
  account.rank = math.max(account.rank, rank_of(record))
  if record.generation == queue.generation then
    local last, waits = read_lane(account, record)
    save_lane(account, record, last, waits - 1)
    account.waits = account.waits - 1
    if gating then
      gating.leave(gating.find(record), record)
    end
  end
end
