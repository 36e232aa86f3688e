-- The records of messages.
--
-- A message is in one state: (w)aiting, (l)eased, (d)elayed, dea(x), or (f)inished, of which the record is kept for a while.
-- `token` is that of its lease; of one that has ended, it is none, or has the outcome.  `order` is the number with which a message
-- was added; `held` is the gate in the line of which it waits, or false: see queue/_gates.  `suspect` and `company`: see queue/_suspects.
-- `charge` and `advance` are what its tenant was charged for it, and how far that moved the virtual time on: see queue/_virtual.

-- A record is packed as an array.  Written out, since loops over the names take several times as long.
local function unpack_record(packed)
  local v = cmsgpack.unpack(packed)
  return {
    state = v[1], tenant = v[2], key = v[3], stream = v[4], entry = v[5], rank = v[6], attempts = v[7], token = v[8],
    charge = v[9], bytes = v[10], unique = v[11], scope = v[12], deadline = v[13], since = v[14], hand = v[15],
    generation = v[16], taken = v[17], at = v[18], advance = v[19] or 0, order = v[20] or 0, suspect = v[21] or 0,
    company = v[22] or 0, held = v[23],
  }
end

local function pack_record(r)
  return cmsgpack.pack({
    r.state, r.tenant, r.key, r.stream, r.entry, r.rank, r.attempts, r.token, r.charge, r.bytes, r.unique, r.scope, r.deadline,
    r.since, r.hand, r.generation, r.taken, r.at, r.advance, r.order, r.suspect, r.company, r.held,
  })
end

-- A script that moves many messages reads their records together, and writes them together before it ends: between `begin_batch` and
-- `save_records` they are here.
local cached, unsaved, is_batch = {}, {}, false

local function begin_batch(ids)
  is_batch = true
  if #ids > 0 then
    for i, packed in ipairs(redis.call("HMGET", messages, unpack(ids))) do
      cached[ids[i]] = packed
    end
  end
end

local function save_records()
  if #unsaved > 0 then
    redis.call("HSET", messages, unpack(unsaved))
    unsaved = {}
  end
end

local function read_record(id)
  local packed = cached[id]
  if packed == nil then
    packed = redis.call("HGET", messages, id)
  end
  return packed and unpack_record(packed)
end

local function save_record(id, record)
  local packed = pack_record(record)
  if is_batch then
    cached[id], unsaved[#unsaved + 1], unsaved[#unsaved + 2] = packed, id, packed
  else
    redis.call("HSET", messages, id, packed)
  end
end

local function delete_record(id)
  save_records()
  redis.call("HDEL", messages, id)
  cached[id] = false
end
