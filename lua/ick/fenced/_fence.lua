-- A part of the fenced scripts: who holds the reservation?  Follows ick/_whole.
-- keys: fence, held
-- The fence is a hash: `number` of the last reservation, which only goes up; `request` and `holder` of the one that
-- stands, empty when none does; `pulse`, counted up by its signs of life; `committed` by the exchange that began it.

for _, expectation in ipairs({{fence, "hash"}, {held, "zset"}}) do
  local found = redis.call("TYPE", expectation[1]).ok
  if found ~= "none" and found ~= expectation[2] then
    return damaged(expectation[1], expectation[2], found)
  end
end
local fields = redis.call("HMGET", fence, "number", "request", "holder", "pulse", "committed")
local standing = {
  number = tonumber(fields[1] or "0"),
  request = fields[2] or "",
  holder = fields[3] or "",
  pulse = tonumber(fields[4] or "0"),
  committed = tonumber(fields[5] or "0"),
}
if not (standing.number and standing.pulse and standing.committed) then
  return damaged(fence, "numbers", "something else")
end

-- A number may come again on a server that was put back to an older state; a request's id does not.
local function stands(number_, request_)
  return request_ ~= "" and standing.request == request_ and standing.number == number_
end

-- Members are done, and no longer held: all of them, or those in ARGV from `first` on.
local function commit(whole, first)
  if whole then
    local members = redis.call("ZCARD", held)
    redis.call("DEL", held)
    return members
  end
  return sliced(ARGV, first, function(...) return redis.call("ZREM", held, ...) end)
end

local function describe(word)
  return {word, standing.number, standing.request, standing.holder, standing.pulse}
end
