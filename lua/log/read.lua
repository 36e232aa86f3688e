-- Reads the entries that hold a range of offsets, and where the log begins and ends, all at one moment.
-- includes: log/_epochs
-- keys: stream, newest_epoch, ends
-- args: offset:int, count:int, backwards:int, max_bytes:int, seen:int, identity, seen_epoch
-- returns: {"read", epoch, first, tail, low, high, {entry...}} | {"lost", epoch, first, tail} | {"broken", found}
--
-- The range begins at `offset` and holds `count` offsets; with `backwards` it ends there, or at the tail.  The reply says
-- which offsets it covers, `low` to `high`: fewer if the log ends, or if the entries have more than `max_bytes`, of which
-- the first is returned whatever its size.  An offset that it covers and no entry holds has been evicted.
-- `seen` is the last offset that the caller has read, and `identity` that record, as "id time": if the log ends before, or
-- has another record there (unless `identity` is empty), it is not what it was; nor if an epoch since `seen_epoch`, that of the
-- read before, began with other records up to there.  An entry that holds it in its middle is in the reply, for the caller.
-- Cost: O(log entries + bytes).

if damage then
  return {"broken", damage}
end
if tail < seen or is_other then
  return {"lost", epoch, first, tail}
end

local low, high = math.max(1, offset), offset + count - 1
if backwards == 1 then
  high = math.min(offset, tail)
  low = math.max(1, high - count + 1)
end
high = math.min(high, tail)

local found, bytes, records, refusal = {}, 0, 0, nil

-- Adds an entry, unless what was added is enough; says whether there may be more.
local function add(entry)
  local begin, ends = describe(entry)
  if not begin then
    refusal = {"broken", "entry " .. entry[1]}
    return false
  end
  local last = offset_of(entry[1])
  if last == seen and last < low then
    refusal = identity ~= "" and ends ~= identity and {"lost", epoch, first, tail} or nil
    return not refusal
  elseif begin > high then
    return backwards == 1
  elseif #found > 0 and bytes >= max_bytes then
    if backwards == 1 then
      low = found[#found].begin
    else
      high = found[#found].last
    end
    return false
  end
  bytes = bytes + bytes_of(entry)
  records = records + last - begin + 1
  found[#found + 1] = {entry = entry, begin = begin, last = last}
  if backwards == 1 then
    return begin > low
  end
  return last < high
end

-- How many entries to read next: as many as are needed, if they go on like those before, and no more than `max_bytes`.
local function plan(left)
  if #found == 0 then
    return 1
  end
  local fitting = math.floor((max_bytes - bytes) * #found / math.max(1, bytes))
  return math.max(1, math.min(math.ceil(left * #found / records), fitting, ENTRIES_A_READ))
end

local is_more = low <= high
if is_more and backwards == 1 then
  local entry = redis.call("XRANGE", stream, id_of(high), "+", "COUNT", 1)[1]
  is_more = not entry or add(entry)
end
local from = backwards == 1 and "(" .. id_of(high) or id_of(seen == low - 1 and math.max(1, seen) or low)
while is_more do
  local asked = plan(high - low + 1 - records)
  local entries = backwards == 1 and redis.call("XREVRANGE", stream, from, id_of(low), "COUNT", asked)
    or redis.call("XRANGE", stream, from, "+", "COUNT", asked)
  for _, entry in ipairs(entries) do
    is_more = is_more and add(entry)
    from = "(" .. entry[1]
  end
  is_more = is_more and #entries == asked
end
if refusal then
  return refusal
end

local reply = {}
for place, each in ipairs(found) do
  reply[place] = each.entry
end
return {"read", epoch, first, tail, low, math.max(high, low - 1), reply}
