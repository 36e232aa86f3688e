-- Shared by the scripts that move messages: lanes, which take turns in a line.
-- includes: queue/_accounts
--
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

-- The rank of a message that joins a line.  Its lanes take turns: it comes behind those of its own lane, and beside those of the others.
local function next_rank(account, record)
  local last, waits = read_lane(account, record)
  local rank = math.max(account.rank, last) + (GAPS[string.sub(record.key, 1, 2)] or NORMAL)
  save_lane(account, record, rank, waits + 1)
  account.waits = account.waits + 1
  return rank
end
