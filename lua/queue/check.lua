-- Check whether the parts of the queue agree; writes nothing.
-- includes: queue/_whole
-- keys: queue/_keys
-- args: sample:int
-- returns: {"checked", is_rebuilding, server, ahead, part, …} | {"garbage", key} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- `server` is the time of the server in milliseconds since 1970, and `ahead` how far the queue's clock is ahead of it.
-- A part is one that does not agree with the others.  About `sample` values of the messages and of the accounts are read, to see
-- whether they are ours.  Cost: O(streams + sample).

if is_lost() then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
for _, key in ipairs({messages, accounts}) do
  local sampled = redis.call("HSCAN", key, 0, "COUNT", sample)[2]
  for i = 2, math.min(#sampled, 2 * sample), 2 do
    -- Ours are packed arrays, of up to 15 values or of more.
    local first = string.byte(sampled[i]) or 0
    if first ~= 0xdc and (first < 0x90 or first > 0x9f) then
      return {"garbage", key}
    end
  end
end

local entries = 0
for stream = 0, queue.streams - 1 do
  entries = entries + (call_or_nil("XLEN", KEYS[streams + stream]) or 0)
end
local reply = {"checked", redis.call("HEXISTS", meta, "rebuilding"), server, now - server}
for _, name in ipairs(parts_apart(entries)) do
  reply[#reply + 1] = name
end
if was_interrupted() then
  reply[#reply + 1] = "keys"
end
return reply
