-- Whether the log is still the one that the group has read.
-- includes: log/group/_group
-- keys: stream, ends, state

-- After an epoch that began with other records at offsets that the group has read: the cursor goes back to the first of them.
local function follow_epoch(at, before)
  if epoch <= (before or epoch) then
    return
  end
  local kept, found = nil, redis.call("HGETALL", ends)
  for i = 1, #found, 2 do
    if tonumber(found[i]) > before then
      kept = math.min(kept or math.huge, tonumber(found[i + 1]))
    end
  end
  redis.call("HSET", state, "epoch", text_of(epoch))
  if not kept then
    return
  end
  forget_pending_from(kept + 1)
  redis.call("HDEL", state, "mark", "identity")
  if at > kept + 1 then
    place_cursor(kept + 1, "0")
    redis.call("HINCRBY", state, "rewound", 1)
    return {"rewound", at, kept + 1, epoch}
  end
end

-- The last entry that was read must be the same one, if it is still there, and the log that of the same writers.
local function check_mark()
  local mark, identity, written_by = unpack(redis.call("HMGET", state, "mark", "identity", "writer"))
  local marked = mark and redis.call("XRANGE", stream, mark, mark)[1]
  local is_other = mark and written_by and written_by ~= writer and epoch_text ~= ""
  if is_other or (marked and select(2, describe(marked)) ~= identity) then
    return {"differs", offset_of(mark) or 0}
  end
end
