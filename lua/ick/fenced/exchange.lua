-- Commit what is done of a reservation and begin the next, which holds what was left and the oldest dirty members.
-- begins: ick/_whole, ick/fenced/_fence
-- keys: version, dirty, reserved, fence, held
-- args: request, holder, follows:int, number:int, former, floor:int, size:int, adopt:int, all:int, done...
-- returns: {"held", number, request, committed, member, score, …} | {"superseded" or "busy", number, request, holder, pulse}
--
-- With follows = 1 the reservation (number, former) is exchanged for the next.  With 0 a new one begins: where none
-- stands, where our own does, or in place of (number, former), which somebody has seen standing still; what it held is
-- dirty again.  Sent again with the same `request` it gives the same reservation and writes nothing.
-- Why nothing is forgotten: under one number the held set only shrinks, and a member that is held is never merged with
-- its newer dirtiness, which waits in the dirty set.
-- `adopt` takes from the reserved set too, where a plain reserve puts members.  Cost: O((size + done) × log members).

local function answer(committed)
  local reply = {"held", standing.number, standing.request, committed}
  for _, value in ipairs(redis.call("ZRANGE", held, 0, -1, "WITHSCORES")) do
    reply[#reply + 1] = value
  end
  return reply
end

if standing.request == request then
  return answer(standing.committed)
end
local replaces = stands(number, former)
if follows == 1 and not replaces then
  return describe("superseded")
elseif follows == 0 and not replaces and standing.request ~= "" and standing.holder ~= holder then
  return describe("busy")
end

local committed = 0
if follows == 0 then
  fold(held, dirty, redis.call("ZCARD", held))
else
  committed = commit(all == 1, done)
end

-- Nothing to give and nothing given back: the reservation stays, and a consumer that waits writes nothing.
local sources = adopt == 1 and redis.call("EXISTS", dirty, reserved) or redis.call("EXISTS", dirty)
if follows == 1 and committed == 0 and sources == 0 and redis.call("EXISTS", held) == 0 then
  return answer(0)
end
if not format then
  redis.call("SET", version, FORMAT)
end

-- A smaller size than before: the newest go back, so that what is held is what the answer says.
local left = redis.call("ZCARD", held)
if left > size then
  local surplus = turned(redis.call("ZRANGE", held, size, -1, "WITHSCORES"))
  redis.call("ZREMRANGEBYRANK", held, size, -1)
  sliced(surplus, 1, function(...) return redis.call("ZADD", dirty, "LT", ...) end)
  left = size
end

local known = {}
if left > 0 then
  for _, member in ipairs(redis.call("ZRANGE", held, 0, -1)) do
    known[member] = true
  end
end

-- The `size` lowest of both sets hold enough that is not held: no more than `left` of them are.
local function lowest(key, wanted)
  return wanted and redis.call("ZRANGE", key, 0, size - 1, "WITHSCORES") or {}
end
local fresh, plain = lowest(dirty, left < size), lowest(reserved, adopt == 1 and left < size)
local marks, members, i, j = {}, {}, 1, 1
while #members < size - left and (fresh[i] or plain[j]) do
  local member, score
  if not plain[j] or (fresh[i] and tonumber(fresh[i + 1]) <= tonumber(plain[j + 1])) then
    member, score, i = fresh[i], fresh[i + 1], i + 2
  else
    member, score, j = plain[j], plain[j + 1], j + 2
  end
  if not known[member] then
    known[member] = true
    members[#members + 1] = member
    marks[#marks + 1] = score
    marks[#marks + 1] = member
  end
end
-- Removed before added, as in fold.
sliced(members, 1, function(...) return redis.call("ZREM", dirty, ...) end)
if #plain > 0 then
  sliced(members, 1, function(...) return redis.call("ZREM", reserved, ...) end)
end
sliced(marks, 1, function(...) return redis.call("ZADD", held, ...) end)

standing.number = math.max(standing.number, floor) + 1
standing.request = request
redis.call("HSET", fence, "number", string.format("%.0f", standing.number), "request", request,
  "holder", holder, "pulse", "0", "committed", string.format("%.0f", committed))
return answer(committed)
