-- The readers of a group that wait, in the order in which they came: the first watches the log, and who becomes the first is woken.
-- keys: places, heard, wakes...
-- args: reader, word, valid:int
-- returns: {"line", place, others, wake}
--
-- `word`: "wait" joins the line or stays in it, "leave" leaves it, "look" does neither.  A reader that has not been heard of for
-- `valid` milliseconds is out.  `place` is 0 for the first, and -1 outside; `others` counts the other readers.
-- `wake` is the number of the list on which this reader is woken: one of its own, unless more wait than there are lists.
-- Cost: O(log readers).

local time = redis.call("TIME")
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lists = #KEYS - wakes + 1

local function wake_of(place)
  return tonumber(place) % lists
end

local first_before = redis.call("ZRANGE", places, 0, 0)[1]
local function remove(name)
  redis.call("ZREM", places, name)
  redis.call("ZREM", heard, name)
end

-- Beyond `valid`: the server's clock was set back.
for _, bounds in ipairs({{"-inf", now}, {now + valid + 1, "+inf"}}) do
  for _, name in ipairs(redis.call("ZRANGEBYSCORE", heard, bounds[1], bounds[2])) do
    remove(name)
  end
end

local place = redis.call("ZSCORE", places, reader)
if word == "wait" then
  if not place then
    place = tonumber(redis.call("ZRANGE", places, -1, -1, "WITHSCORES")[2] or "0") + 1
    redis.call("ZADD", places, string.format("%.0f", place), reader)
  end
  redis.call("ZADD", heard, string.format("%.0f", now + valid), reader)
elseif word == "leave" then
  remove(reader)
end

local first = redis.call("ZRANGE", places, 0, 0, "WITHSCORES")
if first[1] == reader then
  redis.call("DEL", KEYS[wakes + wake_of(place)])
elseif first[1] and first[1] ~= first_before then
  redis.call("LPUSH", KEYS[wakes + wake_of(first[2])], "first")
end
local rank = redis.call("ZRANK", places, reader)
return {"line", rank or -1, redis.call("ZCARD", places) - (rank and 1 or 0), place and wake_of(place) or -1}
