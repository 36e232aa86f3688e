-- Finds the first entry whose last record was staged at a time or later, by bisection over offsets.
-- includes: log/_epochs
-- keys: stream, newest_epoch, ends
-- args: threshold:int, seen:int, seen_epoch
-- returns: {"found", epoch, first, tail, {entry} or {}} | {"lost", epoch, first, tail} | {"broken", found}
--
-- `threshold` is in microseconds since 1970.  Staging times are not in the order of offsets, so a caller subtracts
-- what the longest transaction takes: no record that was staged later then comes before the entry that is found.
-- Cost: O(log entries), each step the bytes of an entry.

if damage then
  return {"broken", damage}
elseif is_other then
  return {"lost", epoch, first, tail}
end

local low, high, found = first, tail + 1, nil
while low < high do
  local middle = math.floor((low + high) / 2)
  local entry = redis.call("XRANGE", stream, id_of(middle), "+", "COUNT", 1)[1]
  if not entry then
    high = middle
  else
    local begin, ends = describe(entry)
    local staged_us = begin and tonumber(string.match(ends, "(%d+)$"))
    if not staged_us then
      return {"broken", "entry " .. entry[1]}
    elseif staged_us < threshold then
      low = offset_of(entry[1]) + 1
    else
      found, high = entry, math.min(begin, middle)
    end
  end
end
return {"found", epoch, first, tail, {found}}
