-- The bodies of messages: payload and headers.
-- includes: queue/_queue, queue/_records
--
-- The body of a message that waits or is leased is an entry of a stream; that of one that is delayed or dead is parked in a hash,
-- since an old entry would keep the memory of its neighbours.

-- Members of `delayed` and `dead`: those of the same millisecond are in the order in which they were added.
local function parked_member(id, record)
  return string.format(PADDING, record.order) .. id
end

local function parked_id(member)
  return string.sub(member, 15)
end

-- The key of the stream that holds a message's body; nil if the body is parked.
local function stream_key(record)
  return record.stream >= 0 and KEYS[streams + record.stream] or nil
end

-- The payload and headers of a message that waits or is leased; nil if they are gone.
local function read_entry(record)
  local key = stream_key(record)
  local entries = key and call_or_nil("XRANGE", key, record.entry, record.entry)
  local fields = entries and entries[1] and entries[1][2]
  if fields then
    return fields[8], fields[10]
  end
end

-- The record comes first: a script that is interrupted leaves none that says that its body is here.
local function delete_entry(record)
  save_records()
  local key = stream_key(record)
  if key then
    call_or_nil("XDEL", key, record.entry)
  end
end
