-- Commit members of a reservation and begin the next one, which holds the remaining members and the oldest dirty ones.
-- includes: ick/fenced/_fence
-- keys: version, dirty, reserved, fence, held
-- args: request, holder, follows:int, replaced_number:int, replaced_request, floor:int, size:int, adopt:int, all:int, done...
-- returns: {"held", number, request, committed, member, score, …} | {"superseded" or "busy", number, request, holder, heartbeats}
--
-- With follows = 1 the reservation (replaced_number, replaced_request) is exchanged for the next one.  With 0 a new one
-- begins if there is none, if the current one is this holder's own, or if it is the stale (replaced_number,
-- replaced_request); its members become dirty again.  A repeated `request` returns the same reservation and writes nothing.
-- Why no member is forgotten: under one number the held set only shrinks, and a held member is never merged with its newer
-- mark, which stays in the dirty set.
-- adopt = 1 also takes from the reserved set, where a plain reserve puts members.  Cost: O((size + done) × log members).

local function answer(committed)
  local reply = {"held", current.number, current.request, committed}
  for _, value in ipairs(redis.call("ZRANGE", held, 0, -1, "WITHSCORES")) do
    reply[#reply + 1] = value
  end
  return reply
end

if current.request == request then
  return answer(current.committed)
end
local replaces = is_current(replaced_number, replaced_request)
if follows == 1 and not replaces then
  return describe("superseded")
elseif follows == 0 and not replaces and current.request ~= "" and current.holder ~= holder then
  return describe("busy")
end

-- A missing Ick stays missing while there is nothing to give back: otherwise nobody would see that its members are lost.
if not format and redis.call("EXISTS", held) == 1 then
  redis.call("SET", version, FORMAT)
end

local committed = 0
if follows == 0 then
  move_lowest(held, dirty, redis.call("ZCARD", held))
else
  committed = commit(all == 1, done)
end

-- Nothing was committed and nothing is available: the reservation stays, so that a waiting consumer writes nothing.
local sources = adopt == 1 and redis.call("EXISTS", dirty, reserved) or redis.call("EXISTS", dirty)
if follows == 1 and committed == 0 and sources == 0 and redis.call("EXISTS", held) == 0 then
  return answer(0)
end
begin_writing()

-- The size has shrunk: the newest members go back, so that the held set is what the reply lists.
local left = redis.call("ZCARD", held)
if left > size then
  local surplus = swap_pairs(redis.call("ZRANGE", held, size, -1, "WITHSCORES"))
  in_slices(surplus, 1, function(...) return redis.call("ZADD", dirty, "LT", ...) end)
  redis.call("ZREMRANGEBYRANK", held, size, -1)
  left = size
end

local known = {}
if left > 0 then
  for _, member in ipairs(redis.call("ZRANGE", held, 0, -1)) do
    known[member] = true
  end
end

-- The `size` lowest of each set are enough: at most `left` of them are held already.
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
-- The identity first: should a command below fail, the held set has not grown under an identity whose holder knows less.
current.number = math.max(current.number, floor) + 1
current.request = request
redis.call("HSET", fence, "number", string.format("%.0f", current.number), "request", request,
  "holder", holder, "heartbeats", "0", "committed", string.format("%.0f", committed))
-- Added before removed, as in move_lowest.
in_slices(marks, 1, function(...) return redis.call("ZADD", held, ...) end)
in_slices(members, 1, function(...) return redis.call("ZREM", dirty, ...) end)
if #plain > 0 then
  in_slices(members, 1, function(...) return redis.call("ZREM", reserved, ...) end)
end
return answer(committed)
