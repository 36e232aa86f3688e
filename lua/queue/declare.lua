-- Declare the limits of tenants and keys: those of a pipeline, which hold where `limit` has set none; repeated, it changes nothing.
-- includes: queue/_moves, queue/_declared
-- keys: queue/_keys
-- args: declared, within, items...
-- returns: {"declared", is_new} | {"unknown"} | {"lost"} | {"foreign", key}
--
-- `declared` is the version, which stands for all of them, and "" for none; a tenant or a key is 3 arguments: "tenant" or "key", name, and text as in limit.lua.
-- A version that comes alone is "unknown" if it does not hold.  Those declared before are replaced.
-- `within` is where keys are limited: "queue", "tenant", or "" for not at all; if it changes, the next sweep rebuilds the queue, which
-- counts what each key has in flight.
-- Cost: O(limits + blocked tenants) if it is new, and O(keys at a limit) as well if one of theirs is, or a pause of a tenant has ended.

if not is_undeclared() and queue.declared == declared then
  return {"declared", 0}
elseif not within then
  return {"unknown"}
elseif is_lost(true) then
  return {"lost"}
end
begin_writing()  -- also when memory is full: otherwise nothing would be taken until there is room
local was_within, before = gating and gating.within or "", {}
local all = redis.call("HGETALL", limits)
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 1) == DECLARED then
    before[all[i]] = all[i + 1]
    redis.call("HDEL", limits, all[i])
  end
end
before[VERSION], before[WITHIN] = nil, nil

-- What waits for a key may go now if its limit is another, or a tenant is paused no longer.
local has_room = false
local function compare(name, text)
  local is_key = string.sub(name, 1, #LIMITED) == LIMITED
  has_room = has_room or (before[name] ~= text and (is_key or parse_limits(before[name]).paused))
  before[name] = nil
end
for from = items, #ARGV, 3 do
  local name = (ARGV[from] == "key" and LIMITED or DECLARED) .. ARGV[from + 1]
  redis.call("HSET", limits, name, ARGV[from + 2])
  compare(name, ARGV[from + 2])
end
for name in pairs(before) do
  compare(name, nil)
end
if within ~= "" then
  redis.call("HSET", limits, WITHIN, within)
end
is_suspect = is_suspect or (format and within ~= was_within)
if declared ~= "" then
  redis.call("HSET", limits, VERSION, declared)
end
redis.call("HSET", meta, "declared", declared)
for _, key in ipairs({blocked, has_room and openings or nil}) do
  redis.call("ZUNIONSTORE", key, 1, key, "WEIGHTS", 0)
end
save_queue()
wake()
return {"declared", 1}
