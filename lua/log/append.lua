-- Compare and append: the log ends up the same, however often and by however many publishers a batch is sent.
-- keys: stream, newest_epoch
-- args: epoch:int, first:int, begins:int, records...
-- returns: {"appended", tail, added} | {"behind", tail} | {"fenced", epoch} | {"foreign", offset, id} | {"broken", found}
--
-- A record is seven arguments: id, key, action, object, data, headers, ts.  `first` is the offset of the first record;
-- `begins` is 1 if the journal begins at `first`, so that no earlier record will ever come.
-- The tail is read, never assumed: a reply may have been lost, another publisher may have been faster, and this
-- server may have been emptied or restored to an older state.  A retry finds the tail past its records and adds 0.
-- Cost: O(records).

local WIDTH = 7
local count = (#ARGV - records + 1) / WIDTH
local last = first + count - 1

local function id_of(offset)
  return string.format("%.0f-0", offset)
end

-- The value of a record's argument; 0 is the id, the last is the staging time.
local function argument(offset, place)
  return ARGV[records + (offset - first) * WIDTH + place]
end

local text = redis.call("GET", newest_epoch)
if text and not (#text < 11 and string.match(text, "^%d+$")) then
  return {"broken", "the key of its epoch holds no number"}
end
local epoch_held = tonumber(text or "0")
if epoch_held > epoch then
  return {"fenced", epoch_held}
end

-- The tail is the last id ever given, not the last entry: a stream may have been evicted to its end.
local tail, oldest = 0, nil
if redis.call("EXISTS", stream) == 1 then
  local info = redis.call("XINFO", "STREAM", stream)
  for i = 1, #info, 2 do
    if info[i] == "last-generated-id" then
      local offset, sequence = string.match(info[i + 1], "^(%d+)%-(%d+)$")
      if sequence ~= "0" then
        return {"broken", "entry " .. info[i + 1]}
      end
      tail = tonumber(offset)
    elseif info[i] == "first-entry" and info[i + 1] then
      oldest = tonumber(string.match(info[i + 1][1], "^%d+"))
    end
  end
end

-- Whether a record has the form that is written below.
local function is_ours(entry)
  local fields = entry[2]
  return #fields == 2 * WIDTH and fields[1] == "id" and fields[2 * WIDTH - 1] == "ts"
end

-- The last entry that the batch and the stream share must be the same record.  The id alone does not prove it: a Postgres
-- that lost commits assigns their ids again.  It may be missing only if it has been evicted, with all that came before.
if tail >= first then
  local shared = math.min(tail, last)
  local entry = redis.call("XRANGE", stream, id_of(shared), id_of(shared))[1]
  local newest = redis.call("XREVRANGE", stream, "+", "-", "COUNT", 1)[1]
  for _, found in pairs({entry, newest}) do
    if not is_ours(found) then
      return {"broken", "entry " .. found[1]}
    end
  end
  if not entry and oldest and oldest <= shared then
    return {"broken", "no entry " .. id_of(shared)}
  end
  if entry and (entry[2][2] ~= argument(shared, 0) or entry[2][2 * WIDTH] ~= argument(shared, WIDTH - 1)) then
    return {"foreign", shared, tostring(entry[2][2])}
  end
elseif tail + 1 < first and begins == 0 then
  return {"behind", tail}
end

-- Only a publisher that gets this far fences off those of older epochs.  Before the entries: no log without an epoch, should the
-- server refuse this command.
if epoch_held < epoch then
  redis.call("SET", newest_epoch, string.format("%.0f", epoch))
end

local added = 0
for offset = math.max(first, tail + 1), last do
  local at = records + (offset - first) * WIDTH
  redis.call("XADD", stream, id_of(offset),
    "id", ARGV[at], "key", ARGV[at + 1], "action", ARGV[at + 2], "object", ARGV[at + 3],
    "data", ARGV[at + 4], "headers", ARGV[at + 5], "ts", ARGV[at + 6])
  added = added + 1
end

return {"appended", math.max(tail, last), added}
