-- Shared by the scripts that move messages: the line of each tenant.  Include it after queue/_turns.
-- keys: messages, waiting, lanes, leases, deadlines, streams...

local function watch_deadline(id, record)
  if record.deadline > 0 then
    redis.call("ZADD", deadlines, record.deadline, id)
  end
end

local function waiting_member(id, record)
  return record.tenant .. "\0" .. record.rank .. id
end

-- A lane is the messages of a tenant with one key that wait: the rank of the last of them, and how many there are.  Those without a key
-- have theirs in the account.  A key begins with the priority of its messages, unless that is the normal one.
local function lane_of(record)
  return record.tenant .. "\0" .. record.key
end

local function read_lane(account, record)
  if record.key == "" then
    return account.last_rank, account.keyless
  end
  local last, waits = string.match(redis.call("HGET", lanes, lane_of(record)) or "0 0", "^(%d+) (%d+)$")
  return number(last), number(waits)
end

local function save_lane(account, record, last, waits)
  if record.key == "" then
    account.last_rank, account.keyless = waits > 0 and last or 0, math.max(waits, 0)
  elseif waits > 0 then
    redis.call("HSET", lanes, lane_of(record), string.format("%.0f %d", last, waits))
  else
    redis.call("HDEL", lanes, lane_of(record))
  end
end

local function rank_of(record)
  return tonumber(string.sub(record.rank, 1, 14), 16)
end

-- By how much each message of a lane ranks behind the one before: eight of high priority go for one of normal priority, and eight of
-- these for one of low priority.
local NORMAL, GAPS = 8, {["\1h"] = 1, ["\1l"] = 64}

-- The message's place in its tenant's line.  The tenant's keys take turns: a message comes behind those of its own key, and beside
-- those of the others.
local function rank_message(account, record)
  local last, waits = read_lane(account, record)
  local rank = math.max(account.rank, last) + (GAPS[string.sub(record.key, 1, 2)] or NORMAL)
  save_lane(account, record, rank, waits + 1)
  account.waits = account.waits + 1
  queue.sequence = queue.sequence + 1
  record.rank = string.format(PADDING .. PADDING, rank, queue.sequence)
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
  rank_message(account, record)
  record.state, record.stream, record.at = "w", stream, now
  lengths[stream] = lengths[stream] + 1
  record.entry = redis.call("XADD", KEYS[streams + stream], "*", "id", id, "tenant", record.tenant, "key", record.key,
    "payload", payload, "headers", headers, "record", pack_record(record))
  save_record(id, record)
  join_line(account, waiting_member(id, record))
  mark_moved(account)
  return true
end

-- Puts a message that was handed over back where it was in its tenant's line.
local function put_back(id, record)
  local account = tenant_account(record.tenant)
  mark_moved(account)
  if record.generation == queue.generation then
    join_lane(account, record)
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
  end
end
