-- Makes room in a log: evicts its oldest entries, whether they have been read or not.  The newest one stays.
-- includes: log/_entry
-- keys: stream
-- args: max_bytes:int, goal:int, underway...
-- returns: {"room", taken, evicted} | {"broken", found}
--
-- Nothing happens while the stream takes at most `max_bytes` bytes; beyond it, entries go until it takes about `goal` bytes.
-- Both are less by what is under way to the log: `underway` is the last offset and the size of each batch that the caller
-- has sent, and may be in the log already.
-- `taken` is the server's own count, of all nodes.  Entries that have left a node half empty do not lessen it.
-- Cost: O(nodes of the stream), and O(bytes evicted).  A call evicts about `A_CALL` bytes at most.

local A_CALL, A_NODE = 4 * 1024 * 1024, 4096

local function measure()
  return redis.call("MEMORY", "USAGE", stream, "SAMPLES", "0") or 0
end

-- The id of the oldest entry to keep, so that those before it have `bytes` bytes; and how many bytes they have.
local function find_oldest_to_keep(bytes)
  local keep, found, count = "-", 0, 2
  while found < bytes do
    local entries = redis.call("XRANGE", stream, keep, "+", "COUNT", count)
    for i = 1, #entries - 1 do
      if found < bytes then
        found, keep = found + bytes_of(entries[i]), entries[i + 1][1]
      end
    end
    if #entries < count then
      break
    end
    count = math.min(2 * count, ENTRIES_A_READ)
  end
  return keep, found
end

local tail, newest = 0, redis.call("XREVRANGE", stream, "+", "-", "COUNT", 1)[1]
if newest then
  tail = offset_of(newest[1])
  if not tail then
    return {"broken", "entry " .. newest[1]}
  end
end
local coming = 0
for i = underway, #ARGV, 2 do
  if tonumber(ARGV[i]) > tail then
    coming = coming + tonumber(ARGV[i + 1])
  end
end

local taken, evicted, left = measure(), 0, A_CALL
local limit = max_bytes
while taken + coming > limit and left > 0 do
  limit = goal
  local keep, bytes = find_oldest_to_keep(math.min(left, taken + coming - limit + A_NODE))
  if keep == "-" then
    break
  end
  evicted = evicted + redis.call("XTRIM", stream, "MINID", "=", keep)
  taken, left = measure(), left - math.max(bytes, A_NODE)
end
return {"room", taken + coming, evicted}
