-- Compare and append: the log holds the same records in the end, however often, by however many publishers and in whichever
-- batches they are sent.
-- includes: log/_tail, log/_add
-- keys: stream, newest_epoch
-- args: epoch:int, first:int, last:int, begins:int, plain:int, values...
-- returns: {"appended", tail, added} | {"behind", tail} | {"fenced", epoch} | {"foreign", offset, id} | {"broken", found}
--   | {"shared", tail, offset, id, fields}
--
-- `first` and `last` are the offsets of the first and the last record; `begins` is 1 if the journal begins at `first`, so
-- that no earlier record will ever come.
-- A batch becomes one entry.  Its values: the first and the last record, as "id time"; codec; the seven columns.
-- With `plain`, each record becomes an entry.  The values: id, key, action, object, data, headers and ts of each record.
-- "shared": the log has the record at `offset` too, but the script cannot see into the columns of the one or the other:
-- the caller compares the two, and continues after `tail`.
-- A retry finds what it sent before, and adds 0.  Cost: O(bytes).

local function identity(offset)
  if plain == 1 then
    local at = values + (offset - first) * RECORD_FIELDS
    return ARGV[at] .. " " .. ARGV[at + RECORD_FIELDS - 1]
  end
  return offset == last and ARGV[values + 1]
end

local refusal = compare(identity)
if refusal then
  return refusal
end
if plain == 0 and tail >= first and tail < last then
  -- What the two share was evicted.  The rest of this batch is another batch.
  return {"behind", tail}
end
fence_off_older_epochs()

local begin = math.max(first, tail + 1)
if begin > last then
  return {"appended", tail, 0}
end
local failed
if plain == 0 then
  failed = add_batch(first, last, ARGV[values], ARGV[values + 1], values + 2)
else
  for offset = begin, last do
    local at = values + (offset - first) * RECORD_FIELDS
    failed = failed or add(offset,
      "id", ARGV[at], "key", ARGV[at + 1], "action", ARGV[at + 2], "object", ARGV[at + 3],
      "data", ARGV[at + 4], "headers", ARGV[at + 5], "ts", ARGV[at + 6])
  end
end
return failed or {"appended", last, last - begin + 1}
