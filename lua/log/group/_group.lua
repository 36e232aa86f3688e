-- Shared by the scripts of a group: its clock, its cursor, and where it begins.
-- includes: log/_entry
-- keys: stream, newest_epoch, cursor, state, due, pending
--
-- cursor   the next offset, as text: a plain SET moves it
-- state    at, the cursor as the scripts left it; epoch, the log's then; mark, identity and writer, the last entry that was read;
--          fresh, 1 if the log held nothing when the group began; and counts
-- due      the pending offsets, by the time in milliseconds when something happens to them next
-- pending  of each of them: when it expires or 0, and how often it was delivered

local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
-- A number in a pipeline; the mark of the log without one.
local epoch_text = redis.call("GET", newest_epoch) or ""
local epoch = tonumber(epoch_text) or 0
local writer = not tonumber(epoch_text) and epoch_text or ""

local function text_of(number)
  return string.format("%.0f", number)
end

-- The order of these texts is that of the offsets.
local function member_of(offset)
  return string.format("%016.0f", offset)
end

-- The cursor; nil if there is no group, nil and a reply if it holds something else.
local function read_cursor()
  local text = redis.call("GET", cursor)
  if text and not (#text < 16 and string.match(text, "^%d+$")) then
    return nil, {"broken", "the group's cursor holds no offset"}
  end
  return text and math.max(1, tonumber(text)) or nil
end

-- Where a group begins that reads from the first record, or after the last one, and whether the log holds nothing yet.
local function find_start(start)
  local oldest = redis.call("XRANGE", stream, "-", "+", "COUNT", 1)[1]
  local tail, _, broken = find_tail(true)
  if broken then
    return nil, nil, broken
  elseif start == "last" or not oldest then
    return tail + 1, tail == 0 and "1" or "0"
  end
  local first = describe(oldest)
  return first, "0", not first and {"broken", "entry " .. oldest[1]} or nil
end

-- Whether entries have left the log, and not only begun at a higher offset.  Redis 6.2 does not know.
local function has_evicted()
  local info, known = redis.call("XINFO", "STREAM", stream), {}
  for i = 1, #info, 2 do
    known[info[i]] = info[i + 1]
  end
  return known["entries-added"] and known["entries-added"] > known["length"]
end

local function place_cursor(at, fresh)
  redis.call("SET", cursor, text_of(at))
  redis.call("HSET", state, "at", text_of(at), "epoch", text_of(epoch), "fresh", fresh)
  redis.call("HDEL", state, "mark", "identity")
end

-- Of pending records that the cursor comes to again.
local function forget_pending_from(offset)
  for _, member in ipairs(redis.call("ZRANGE", due, 0, -1)) do
    if tonumber(member) >= offset then
      redis.call("ZREM", due, member)
      redis.call("HDEL", pending, member)
    end
  end
end
