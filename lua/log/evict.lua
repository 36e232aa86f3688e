-- Evicts the oldest entries of a log without a pipeline.
-- includes: log/_extent
-- keys: stream, newest_epoch
-- args: upto:int, keep:int, age_us:int
-- returns: {"evicted", first, tail, more} | {"owned", epoch} | {"broken", found}
--
-- One of the three is not -1: records up to an offset, all but so many, or those
-- that are older than `age_us` by the server's clock.  An entry goes when
-- all of its records may.  By time, it goes from the oldest on, and ends at the first entry that is young enough, or after
-- `STEP` entries or about `A_CALL` bytes: `more` is then 1.  `first` is the first offset that is left; one past the tail if none is.
-- Cost: O(entries evicted), and by time their bytes.

local STEP, A_CALL = 1000, 4 * 1024 * 1024

if damage then
  return {"broken", damage}
elseif string.sub(epoch, 1, 7) ~= "writer " and not (epoch == "0" and tail == 0) then
  return {"owned", epoch}
end

local before, more = 1, 0
if upto >= 0 then
  before = upto + 1
elseif keep >= 0 then
  before = tail - keep + 1
else
  local time = redis.call("TIME")
  local before_us = time[1] * 1000000 + time[2] - age_us
  local from, entries, bytes = "-", 0, 0
  while entries < STEP and bytes < A_CALL do
    -- One at a time: any of them may be as large as an append.
    local entry = redis.call("XRANGE", stream, from, "+", "COUNT", 1)[1]
    local begin, ends = nil, nil
    if entry then
      begin, ends = describe(entry)
    end
    local staged_us = begin and tonumber(string.match(ends, "(%d+)$"))
    if entry and not staged_us then
      return {"broken", "entry " .. entry[1]}
    elseif not entry or staged_us >= before_us then
      break
    end
    before, from = offset_of(entry[1]) + 1, "(" .. entry[1]
    entries, bytes = entries + 1, bytes + bytes_of(entry)
  end
  more = (entries == STEP or bytes >= A_CALL) and 1 or 0
end
if before > first then
  redis.call("XTRIM", stream, "MINID", id_of(before))
end

local oldest = redis.call("XRANGE", stream, "-", "+", "COUNT", 1)[1]
return {"evicted", oldest and describe(oldest) or tail + 1, tail, more}
