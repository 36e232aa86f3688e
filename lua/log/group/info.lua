-- What a group has read, and what the log holds for it; writes nothing.
-- includes: log/group/_group
-- keys: stream, newest_epoch, cursor, state, due, pending
-- args: whole:int
-- returns: {"group", next, first, tail, wait, pending, due, delivered, redelivered, dropped, missed, rewound} | {"broken", found}
--
-- `next` is 0 if there is no group; `first` is one past the tail if the log is empty, and -1 without `whole`; `wait`: milliseconds
-- until something is due, or -1.  `due` counts what is.  Cost: O(log pending + bytes of an entry or two).

local at, broken_cursor = read_cursor()
local tail, _, broken = find_tail(true)
if broken_cursor or broken then
  return broken_cursor or broken
end
local first = -1
if whole == 1 then
  first = find_start("first")
  if not first then
    return {"broken", "the first entry"}
  end
end
local next_due = tonumber(redis.call("ZRANGE", due, 0, 0, "WITHSCORES")[2])
local counts = redis.call("HMGET", state, "delivered", "redelivered", "dropped", "missed", "rewound")
for i = 1, #counts do
  counts[i] = tonumber(counts[i] or "0")
end
return {"group", at or 0, first, tail, next_due and math.max(0, next_due - now) or -1, redis.call("ZCARD", due),
  redis.call("ZCOUNT", due, "-inf", text_of(now)), unpack(counts)}
