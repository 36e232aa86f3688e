-- Shared by the scripts that append: fences off older epochs, finds the tail, and compares the record that a batch and the
-- log share.
-- includes: log/_entry
-- keys: stream, newest_epoch
-- args: epoch, first, last, begins
--
-- The tail is read, never assumed: a reply may have been lost, another publisher may have been faster, and this
-- server may have been emptied or restored to an older state.

local text = redis.call("GET", newest_epoch)
if text and not (#text < 11 and string.match(text, "^%d+$")) then
  return {"broken", "the key of its epoch holds no number"}
end
local epoch_held = tonumber(text or "0")
if epoch_held > epoch then
  return {"fenced", epoch_held}
end

local tail, newest, broken = find_tail()
if broken then
  return broken
end

-- The last record that the batch and the log share must be the same one.  Its offset alone does not prove it: a Postgres
-- that lost commits assigns its ids again.  It may be missing only if it has been evicted, with all that came before.
-- `identity(offset)` is the batch's record as "id time"; nil if only the caller can tell.
local function compare(identity)
  if tail < first then
    return tail + 1 < first and begins == 0 and {"behind", tail} or nil
  end
  local shared = math.min(tail, last)
  local entry = redis.call("XRANGE", stream, id_of(shared), "+", "COUNT", 1)[1]
  for _, found in pairs({entry, newest}) do
    if not describe(found) then
      return {"broken", "entry " .. found[1]}
    end
  end
  if not entry then
    return nil
  end
  local begin, ends, id = describe(entry)
  if begin > shared then
    local held = describe(redis.call("XRANGE", stream, "-", "+", "COUNT", 1)[1])
    return held and held <= shared and {"broken", "no entry " .. id_of(shared)} or nil
  end
  local ours = offset_of(entry[1]) == shared and identity(shared)
  if not ours then
    return {"shared", tail, shared, entry[1], entry[2]}
  end
  return ends ~= ours and {"foreign", shared, tostring(id)} or nil
end

-- Only a publisher that gets this far fences off those of older epochs.  Before the entries: no log without an epoch, should
-- the server refuse this command.
local function fence_off_older_epochs()
  if epoch_held < epoch then
    redis.call("SET", newest_epoch, string.format("%.0f", epoch))
  end
end
