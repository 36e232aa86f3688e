-- Shared by the scripts that move messages: the line of each tenant, and the streams of their bodies.  Include it after queue/_turns.
-- keys: messages, waiting, lanes, leases, deadlines, streams...

-- The stream of a hand with the smallest backlog: the first empty one, or the shortest.  An entry leaves its stream with its message,
-- so the length is what waits or is leased.  Streams of another type are passed over; if a hand has no other, any stream serves.
local function choose_stream(hand)
  local chosen, shortest
  local function try(stream)
    local length = stream < queue.streams and call_or_nil("XLEN", KEYS[streams + stream])
    if length and (not shortest or length < shortest) then
      chosen, shortest = stream, length
    end
    return shortest == 0
  end
  for stream in string.gmatch(hand, "%d+") do
    if try(tonumber(stream)) then
      return chosen
    end
  end
  for stream = 0, chosen and -1 or queue.streams - 1 do
    if try(stream) then
      break
    end
  end
  return chosen
end

local function watch_deadline(id, record)
  if record.deadline > 0 then
    redis.call("ZADD", deadlines, record.deadline, id)
  end
end

local function waiting_member(id, record)
  return record.tenant .. "\0" .. record.rank .. id
end

local function lane_of(record)
  return record.tenant .. "\0" .. record.key
end

-- The message's place in its tenant's line.  The tenant's keys take turns: a message comes behind those of its own key, and beside
-- those of the others.  The rank of the last message without a key stands in the account.
local function rank_message(account, record)
  local last = record.key == "" and account.last_rank or number(redis.call("HGET", lanes, lane_of(record)))
  local rank = math.max(account.rank, last) + 1
  if record.key == "" then
    account.last_rank = rank
  else
    redis.call("HSET", lanes, lane_of(record), string.format("%.0f", rank))
  end
  queue.sequence = queue.sequence + 1
  record.rank = string.format(PADDING .. PADDING, rank, queue.sequence)
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
  record.entry = redis.call("XADD", KEYS[streams + stream], "*", "id", id, "tenant", record.tenant, "key", record.key,
    "payload", payload, "headers", headers, "record", pack_record(record))
  save_record(id, record)
  redis.call("ZADD", waiting, 0, waiting_member(id, record))
  mark_moved(account)
  return true
end

-- Puts a message that was handed over back where it was in its tenant's line.
local function put_back(id, record)
  mark_moved(tenant_account(record.tenant))
  record.state, record.at = "w", now
  save_record(id, record)
  redis.call("ZADD", waiting, 0, waiting_member(id, record))
  redis.call("ZREM", leases, id)
  watch_deadline(id, record)
end

-- Takes a message out of its tenant's line.
local function leave_line(account, id, record)
  local member = waiting_member(id, record)
  redis.call("ZREM", waiting, member)
  if account.line and account.line[account.at] == member then
    account.at = account.at + 1
  else
    account.line = nil
  end
  local rank = tonumber(string.sub(record.rank, 1, 14), 16)
  account.rank = math.max(account.rank, rank)
  if record.key ~= "" and number(redis.call("HGET", lanes, lane_of(record))) <= rank then
    redis.call("HDEL", lanes, lane_of(record))
  end
end
