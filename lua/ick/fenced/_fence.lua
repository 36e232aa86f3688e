-- Shared by the fenced scripts: the current reservation.
-- includes: ick/_intact
-- keys: fence, held
-- The fence is a hash: `number` of the last reservation, which only goes up; `request` and `holder` of the current one,
-- empty if there is none; `heartbeats`, how many it has had; `committed`, the number of members that the exchange which
-- began it committed.

for _, expectation in ipairs({{fence, "hash"}, {held, "zset"}}) do
  local found = redis.call("TYPE", expectation[1]).ok
  if found ~= "none" and found ~= expectation[2] then
    return damaged(expectation[1], expectation[2], found)
  end
end
local fields = redis.call("HMGET", fence, "number", "request", "holder", "heartbeats", "committed")
local current = {
  number = tonumber(fields[1] or "0"),
  request = fields[2] or "",
  holder = fields[3] or "",
  heartbeats = tonumber(fields[4] or "0"),
  committed = tonumber(fields[5] or "0"),
}
if not (current.number and current.heartbeats and current.committed) then
  return damaged(fence, "numbers", "something else")
end

-- A number can be used twice if the server was restored to an older state; a request's id cannot.
local function is_current(number_, request_)
  return request_ ~= "" and current.request == request_ and current.number == number_
end

-- Removes members that are done from the held set: all of them, or those in ARGV from `first` on.
local function commit(all_members, first)
  if all_members then
    local members = redis.call("ZCARD", held)
    redis.call("DEL", held)
    return members
  end
  return in_slices(ARGV, first, function(...) return redis.call("ZREM", held, ...) end)
end

local function describe(word)
  return {word, current.number, current.request, current.holder, current.heartbeats}
end
