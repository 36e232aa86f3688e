-- Whether the parts of a queue agree, by their sizes.
-- includes: queue/_queue
--
-- They do not if a key was deleted or changed by hand.

local function count(...)
  local sum = 0
  for _, key in ipairs({...}) do
    sum = sum + redis.call("ZCARD", key)
  end
  return sum
end

-- The names of those parts that do not have as many members as they should; `entries` is the number of entries in all streams.
local function parts_apart(entries)
  local apart = {}
  local function check(name, agrees)
    if not agrees then
      apart[#apart + 1] = name
    end
  end
  check("streams", entries == count(waiting, leases))
  check("parked", redis.call("HLEN", parked) == count(delayed, dead))
  check("messages", redis.call("HLEN", messages) == count(waiting, leases, delayed, dead, finished))
  check("ages", count(ages) == count(waiting, leases, delayed))
  check("tenants", count(ready, over, blocked) == queue.listed and redis.call("HLEN", accounts) == queue.tenants)
  return apart
end
