-- What a read of a group takes: entries, and which of their offsets.
-- includes: log/_entry
-- keys: stream
-- args: codecs, max_bytes:int

local items, dropped, missed, bytes = {}, {}, {}, 0
local found_first, found_last, found_entry

local function add_range(ranges, first, last)
  if ranges[#ranges] == first - 1 then
    ranges[#ranges] = last
  else
    ranges[#ranges + 1], ranges[#ranges + 2] = first, last
  end
end

local function count_ranges(ranges)
  local sum = 0
  for i = 1, #ranges, 2 do
    sum = sum + ranges[i + 1] - ranges[i] + 1
  end
  return sum
end

local function count_items(from)
  local sum = 0
  for i = from, #items do
    sum = sum + items[i][4] - items[i][3] + 1
  end
  return sum
end

-- The fields are sent once for several items of one entry.
local function add_item(entry, first, last, deliveries)
  local before = items[#items]
  local is_same = before and before[1] == entry[1]
  if is_same and before[4] == first - 1 and before[5] == deliveries then
    before[4] = last
  else
    items[#items + 1] = {entry[1], is_same and {} or entry[2], first, last, deliveries}
    bytes = bytes + (is_same and 0 or bytes_of(entry))
  end
end

-- How many entries of one record to read next: as many as are needed and fit, if they are like those before.
local function plan_entries(room)
  local fitting = math.floor((max_bytes - bytes) * #items / math.max(1, bytes))
  return math.max(1, math.min(room, fitting, ENTRIES_A_READ))
end

-- A reply that says why an entry cannot be read: it is not ours, or the reader lacks the library; nil if it can be.
local function refuse_entry(entry, first)
  if not first then
    return {"broken", "entry " .. entry[1]}
  elseif #entry[2] == 2 * BATCH_FIELDS and not string.find(codecs, " " .. entry[2][8] .. " ", 1, true) then
    return {"codec", entry[1], entry[2]}
  end
end

-- The entry that holds an offset; nil if it was evicted, nil and a reply if the log ends before or the entry is none of ours.
local function find_entry(offset)
  if found_entry and found_first <= offset and offset <= found_last then
    return found_entry
  end
  local entry = redis.call("XRANGE", stream, id_of(offset), "+", "COUNT", 1)[1]
  if not entry then
    local tail, _, broken = find_tail(true)
    return nil, broken or (tail < offset and {"behind", tail, offset}) or nil
  end
  local first = describe(entry)
  local refusal = refuse_entry(entry, first)
  if refusal or first > offset then
    return nil, refusal
  end
  found_entry, found_first, found_last = entry, first, offset_of(entry[1])
  return entry
end
