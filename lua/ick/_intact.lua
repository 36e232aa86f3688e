-- Shared by all scripts of an Ick: stops a damaged Ick with an error that says what was found, before anything is written.
-- keys: version, dirty, reserved
-- Redis::Ick calls `dirty` the producer set and `reserved` the consumer set.

local FORMAT = "ick.v1"

local function damaged(key, expected, found)
  return redis.error_reply("DAMAGED " .. key .. ": expected " .. expected .. ", found " .. found
    .. "; penstock.clients.repair repairs it")
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

-- Lua unpacks fewer than 8000 values at once, so `call` gets the values from index `first` on in slices.  Returns the sum.
local SLICE = 7000
local function in_slices(values, first, call)
  local sum = 0
  for from = first, #values, SLICE do
    sum = sum + call(unpack(values, from, math.min(from + SLICE - 1, #values)))
  end
  return sum
end

-- ZRANGE returns {member, score, …}, ZADD takes {score, member, …}.  A score stays the text that Redis wrote, hence exact.
local function swap_pairs(pairs_)
  for i = 1, #pairs_, 2 do
    pairs_[i], pairs_[i + 1] = pairs_[i + 1], pairs_[i]
  end
  return pairs_
end

-- A write that changes nothing.  When memory is full, Redis refuses a script's first write if it could need memory, and lets a
-- script that has written go on: reserving must work then.
local function begin_writing()
  redis.call("ZREMRANGEBYRANK", dirty, 1, 0)
end

-- Moves the `count` lowest members of one set to another; a member in both keeps the lower score.
-- It adds before it removes: a command that the server refuses (an ACL, a server without LT) must not cost a member.
local function move_lowest(from, to, count)
  begin_writing()
  while count > 0 do
    local lowest = swap_pairs(redis.call("ZRANGE", from, 0, math.min(count, SLICE / 2) - 1, "WITHSCORES"))
    if #lowest == 0 then
      return
    end
    redis.call("ZADD", to, "LT", unpack(lowest))
    redis.call("ZREMRANGEBYRANK", from, 0, #lowest / 2 - 1)
    count = count - #lowest / 2
  end
end
