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

-- Appends the body of a message to its stream, with the record, for a rebuild; returns the entry's id.
local function add_entry(id, record, payload, headers)
  return redis.call("XADD", stream_key(record), "*", "id", id, "tenant", record.tenant, "key", record.key,
    "payload", payload, "headers", headers, "record", pack_record(record))
end

-- Id, payload, headers and packed record.
local function unpack_entry(entry)
  local fields = entry[2]
  return fields[2], fields[8], fields[10], fields[11] == "record" and fields[12]
end

-- The record in a body, for a rebuild, which has not counted it: its generation is that of its writing, and may be the number of the
-- rebuild's own if the clock was set back in between.
local function unpack_body(packed)
  local record = unpack_record(packed)
  record.generation = 0
  return record
end

-- The payload and headers of a message that waits or is leased; nil if they are gone.
local function read_entry(record)
  local key = stream_key(record)
  local entries = key and call_or_nil("XRANGE", key, record.entry, record.entry)
  if entries and entries[1] then
    local _, payload, headers = unpack_entry(entries[1])
    return payload, headers
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

local function pack_parked(payload, headers, reason, record)
  return cmsgpack.pack({payload, headers, reason, pack_record(record)})
end

-- Payload, headers, reason and packed record of a message that is delayed or dead; nil if they are gone.
local function read_parked(id)
  local body = redis.call("HGET", parked, id)
  if body then
    return unpack(cmsgpack.unpack(body))
  end
end
