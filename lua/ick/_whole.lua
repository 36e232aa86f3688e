-- A part of the scripts of an Ick: is it whole?  If not, nothing is written and the error says what was found.
-- keys: version, dirty, reserved
-- `dirty` is what Redis::Ick calls the producer set, `reserved` its consumer set.

local FORMAT = "ick.v1"

local function damaged(key, expected, found)
  return redis.error_reply("DAMAGED " .. key .. ": expected " .. expected .. ", found " .. found
    .. "; penstock.channels.ick.repair mends it")
end

for _, expectation in ipairs({{version, "string"}, {dirty, "zset"}, {reserved, "zset"}}) do
  local found = redis.call("TYPE", expectation[1]).ok
  if found ~= "none" and found ~= expectation[2] then
    return damaged(expectation[1], expectation[2], found)
  end
end
local format = redis.call("GET", version)
if format and format ~= FORMAT then
  return damaged(version, FORMAT, string.format("%q", string.sub(format, 1, 40)))
end
if not format and redis.call("EXISTS", dirty, reserved) > 0 then
  return damaged(version, FORMAT .. " beside members", "none")
end

-- Lua unpacks fewer than 8000 values at once: `call` gets them in slices, from the index `first` on.
local SLICE = 7000
local function sliced(values, first, call)
  local sum = 0
  for from = first, #values, SLICE do
    sum = sum + call(unpack(values, from, math.min(from + SLICE - 1, #values)))
  end
  return sum
end

-- Redis answers {member, score, …} and takes {score, member, …}.  Scores stay the text that Redis wrote: exact.
local function turned(pairs_)
  for i = 1, #pairs_, 2 do
    pairs_[i], pairs_[i + 1] = pairs_[i + 1], pairs_[i]
  end
  return pairs_
end

-- Moves the `count` lowest members of one set to another; the lower of two scores stays.
-- Removed before added: a script that has written may go on when memory is full, and giving out must go on then.
local function fold(from, to, count)
  while count > 0 do
    local lowest = turned(redis.call("ZRANGE", from, 0, math.min(count, SLICE / 2) - 1, "WITHSCORES"))
    if #lowest == 0 then
      return
    end
    redis.call("ZREMRANGEBYRANK", from, 0, #lowest / 2 - 1)
    redis.call("ZADD", to, "LT", unpack(lowest))
    count = count - #lowest / 2
  end
end
