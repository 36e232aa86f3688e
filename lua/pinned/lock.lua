-- Take a lock, unless somebody holds it; repeated with the same token, it returns the same number.
-- includes: pinned/_pins
-- keys: pins, times, counter
-- args: name, token, lease:int, above:int
-- returns: {"granted", number} | {"busy", left} | {"foreign", key}
--
-- `lease` and `left` are in milliseconds.  The number is higher than any that was given out before, by whichever of the locks:
-- than the counter, than `above`, and not lower than the clock in microseconds.  The clock stands in for a counter that was lost.
-- The counter comes first: a number that was counted and not given out is skipped.  Cost: O(log pins).

local held = read_pin(name)
if held and held.body ~= token then
  return {"busy", held.deadline - now}
end
rehearse(true)
local number = held and held.number
if not number then
  local last = tonumber(redis.call("GET", counter) or "0") or 0
  number = math.max(last + 1, above + 1, micros)
  redis.call("SET", counter, string.format("%.0f", number))
end
write_pin(name, deadline_after(lease), number, token)
reap(2)
return {"granted", string.format("%.0f", number)}
