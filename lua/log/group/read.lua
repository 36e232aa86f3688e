-- Read for a group: moves its cursor past what it returns; with `retry`, keeps that pending until it is acknowledged.
-- includes: log/group/_history, log/group/_pending
-- keys: stream, newest_epoch, ends, cursor, state, due, pending
-- args: count:int, start, known:int, retry:int, expire:int, max_pending:int, skips:int, max_bytes:int, codecs
-- returns: {"taken", next, tail, wait, dropped, missed, {id, fields, first, last, deliveries}, …}
--   | {"evicted", first, last} | {"behind", tail, offset} | {"differs", offset} | {"rewound", from, to, epoch}
--   | {"codec", id, fields} | {"lost"} | {"broken", found}
--
-- First what is due again, then new records, unless `max_pending` are pending.  An entry comes whole, with the offsets in it that are
-- taken; no fields: those of the item before.  The entry with which they reach `max_bytes` is the last one.  `dropped` and `missed`: first and last offset of each range.  `tail` is -1 if
-- it was not looked for; `wait`: milliseconds until something is due, or -1.  A refusal moves nothing, except "rewound".
-- Cost: O(count × log entries + bytes of the entries).

local at, broken_cursor = read_cursor()
if broken_cursor then
  return broken_cursor
elseif not at then
  if known == 1 or start == "" then
    return {"lost"}
  end
  local found, fresh, broken = find_start(start)
  if broken then
    return broken
  end
  place_cursor(found, fresh)
  at = found
end
local held = redis.call("HMGET", state, "at", "epoch", "fresh")
local is_moved, is_fresh = tonumber(held[1] or "") ~= at, held[3] == "1"
local changed = follow_epoch(at, tonumber(held[2] or "")) or (not is_moved and check_mark())
if changed then
  return changed
end

local next_offset, tail, mark = at, -1, nil
local ahead, place, of_one_record = {}, 0, false

-- The entry that holds the next offset, or the first one after it.  Entries of one record are read several at a time.
local function next_entry(room)
  place = place + 1
  if not ahead[place] then
    local most_ahead = of_one_record and plan_entries(room) or 1
    ahead, place = redis.call("XRANGE", stream, id_of(next_offset), "+", "COUNT", most_ahead), 1
  end
  return ahead[place]
end

local function take_new(room)
  while room > 0 and bytes < max_bytes do
    local entry = next_entry(room)
    local first, identity, refusal, _
    if entry then
      first, identity = describe(entry)
      refusal = refuse_entry(entry, first)
    else
      tail, _, refusal = find_tail(true)
      first = tail and tail + 1
    end
    if refusal then
      return refusal
    elseif first > next_offset then
      local is_lost = not is_fresh or has_evicted()
      if is_lost and skips == 0 then
        return {"evicted", next_offset, first - 1}
      elseif is_lost then
        add_range(missed, next_offset, first - 1)
      end
      next_offset = first
    end
    if not entry then
      local is_short = tail + 1 < next_offset and next_offset == at and not is_moved
      return is_short and {"behind", tail, at - 1} or nil
    end
    local last = math.min(offset_of(entry[1]), next_offset + room - 1)
    add_item(entry, next_offset, last, 1)
    room, next_offset, is_fresh = room - (last - next_offset + 1), last + 1, false
    mark, of_one_record = {entry[1], identity}, #entry[2] == 2 * RECORD_FIELDS
  end
end

local refusal = retry > 0 and take_due()
local again, room = #items, has_more_due and 0 or count - count_items(1)
if retry > 0 then
  room = math.min(room, max_pending - redis.call("ZCARD", due) + freed)
end
refusal = refusal or take_new(room)
if refusal and #items + #dropped + #missed == 0 then
  return refusal
end

save_changes()
for i = again + 1, retry > 0 and #items or 0 do
  for offset = items[i][3], items[i][4] do
    keep_pending(member_of(offset), expire > 0 and now + expire or 0, 1)
  end
end
save_kept()
if next_offset > at then
  redis.call("SET", cursor, text_of(next_offset))
  redis.call("HSET", state, "at", text_of(next_offset), "epoch", text_of(epoch), "fresh", "0")
  add_to("delivered", count_items(again + 1))
end
if mark then
  redis.call("HSET", state, "mark", mark[1], "identity", mark[2], "writer", writer)
end
add_to("redelivered", count_items(1) - count_items(again + 1))
add_to("dropped", count_ranges(dropped))
add_to("missed", count_ranges(missed))
local next_due = retry > 0 and tonumber(redis.call("ZRANGE", due, 0, 0, "WITHSCORES")[2])
local wait = next_due and math.max(0, next_due - now) or -1
return {"taken", next_offset, tail, wait, dropped, missed, unpack(items)}
