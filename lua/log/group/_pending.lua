-- Records that were delivered and not acknowledged yet.
-- includes: log/group/_group, log/group/_taking
-- keys: state, due, pending
-- args: count:int, retry:int, skips:int, max_bytes:int
--
-- Nothing is written before all of it is known: a refusal moves nothing.

local function add_to(name, number)
  if number > 0 then
    redis.call("HINCRBY", state, name, text_of(number))
  end
end

local function read_pending(member)
  local expires, deliveries = string.match(redis.call("HGET", pending, member) or "", "^(%d+) (%d+)$")
  return tonumber(expires or "0"), tonumber(deliveries or "1")
end

local function forget_pending(member)
  redis.call("ZREM", due, member)
  redis.call("HDEL", pending, member)
end

-- Delivered records are due again after `retry`, or when they expire.
local kept_due, kept_pending = {}, {}
local function save_kept()
  if #kept_due > 0 then
    redis.call("ZADD", due, unpack(kept_due))
    redis.call("HSET", pending, unpack(kept_pending))
    kept_due, kept_pending = {}, {}
  end
end

local function keep_pending(member, expires, deliveries)
  local size, at = #kept_due, now + retry
  kept_due[size + 1], kept_due[size + 2] = text_of(expires > 0 and math.min(at, expires) or at), member
  kept_pending[size + 1], kept_pending[size + 2] = member, text_of(expires) .. " " .. text_of(deliveries)
  if size > 500 then
    save_kept()
  end
end

-- Takes what is due again, at most `wanted` after the first `from`: what has expired is dropped, what was evicted is missed.  A reply if
-- nothing more may be read; how many there were, nil if no more may be asked for.
local changes, freed, has_more_due = {}, 0, false
local function take_some_due(from, wanted)
  local members = redis.call("ZRANGEBYSCORE", due, "-inf", text_of(now), "LIMIT", from, wanted)
  table.sort(members)
  for _, member in ipairs(members) do
    local offset, expires, deliveries = tonumber(member), read_pending(member)
    local is_late = expires > 0 and expires <= now
    local entry, refusal
    if not is_late and bytes >= max_bytes and not (found_entry and offset <= found_last) then
      return nil, nil
    elseif not is_late then
      entry, refusal = find_entry(offset)
    end
    if entry then
      add_item(entry, offset, offset, deliveries + 1)
      changes[#changes + 1] = {member, expires, deliveries + 1}
    elseif not is_late and (refusal or skips == 0) then
      return refusal or {"evicted", offset, offset}
    else
      add_range(is_late and dropped or missed, offset, offset)
      freed = freed + 1
      changes[#changes + 1] = {member}
    end
  end
  return nil, #members == wanted and wanted or nil
end

-- Nothing new is read before all that is due: in place of what is dropped or missed, others are looked for.
local MOST_LOOKS = 1000
local function take_due()
  local from, wanted = 0, count
  while wanted > 0 do
    if from >= count + MOST_LOOKS then
      has_more_due = true
      return nil
    end
    local refusal, found = take_some_due(from, wanted)
    if refusal or not found then
      return refusal
    end
    from, wanted = from + found, count - count_items(1)
  end
end

local function save_changes()
  for _, change in ipairs(changes) do
    if change[2] then
      keep_pending(unpack(change))
    else
      forget_pending(change[1])
    end
  end
end
