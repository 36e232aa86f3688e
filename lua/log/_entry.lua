-- Shared by the scripts of a log: what an entry holds, and where the log ends.
-- keys: stream
--
-- An entry is a record (`id` to `ts`, at the record's offset) or a batch (`first` to `times`, at its last offset).

local RECORD_FIELDS, BATCH_FIELDS = 7, 11

-- Most entries to read at once: those to come may be far larger than those before, up to 64 MiB each.
local ENTRIES_A_READ = 16

local function id_of(offset)
  return string.format("%.0f-0", offset)
end

-- The offset in an id; nil if it is none of ours.
local function offset_of(id)
  return tonumber(string.match(id, "^(%d+)%-0$"))
end

local function bytes_of(entry)
  local bytes = 0
  for _, value in ipairs(entry[2]) do
    bytes = bytes + #value
  end
  return bytes
end

-- What an entry begins with, its last record as "id time", and that record's id; nil if it has another form.
local function describe(entry)
  local fields, last = entry[2], offset_of(entry[1])
  if not last then
    return nil
  elseif #fields == 2 * RECORD_FIELDS and fields[1] == "id" and fields[13] == "ts" then
    return last, fields[2] .. " " .. fields[14], fields[2]
  elseif #fields == 2 * BATCH_FIELDS and fields[1] == "first" and fields[21] == "times" then
    return tonumber(fields[2]), fields[6], string.match(fields[6], "^%S*")
  end
end

-- The last offset ever given, and the newest entry if there is one; nil and a reply if an id is none of ours.
-- A stream that was evicted to its end still knows the last id that it gave; with `is_given`, that is asked for in any case: the
-- newest entry may have been deleted.
local function find_tail(is_given)
  local tail, newest = 0, redis.call("XREVRANGE", stream, "+", "-", "COUNT", 1)[1]
  local id = newest and newest[1]
  if (is_given or not newest) and redis.call("EXISTS", stream) == 1 then
    local info = redis.call("XINFO", "STREAM", stream)
    for i = 1, #info, 2 do
      id = info[i] == "last-generated-id" and info[i + 1] or id
    end
  end
  if id then
    tail = offset_of(id)
  end
  return tail, newest, not tail and {"broken", "entry " .. id} or nil
end
