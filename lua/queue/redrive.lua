-- Redrive dead letters: each goes to the end of its tenant's line, with all its attempts before it.
-- includes: queue/_moves
-- keys: queue/_keys
-- args: ids...
-- returns: {"redriven", "ok" | "unknown", …} | {"streams", count} | {"lost"} | {"foreign", key}
--
-- A deadline that has passed holds no longer.  Its unique name is its own again until it is done, unless another message has it.  Cost: O(messages × log messages).

if is_lost() then
  return {"lost"}
elseif #KEYS - streams + 1 < queue.streams then
  return {"streams", queue.streams}
end
begin_writing()

local function redrive(id)
  local record = read_record(id)
  if not record or record.state ~= "x" then
    return "unknown"
  end
  record.attempts, record.token, record.generation, record.since = 0, "", queue.generation, now
  record.suspect = 0
  if record.deadline <= now then
    record.deadline = 0
  end
  if not unpark(id, record) then
    return "unknown"
  end
  watch_deadline(id, record)
  redis.call("ZADD", ages, record.since, id)
  if record.unique ~= "" and not holder_of(record.unique) then
    redis.call("HSET", uniques, record.unique, id)
    redis.call("ZREM", windows, record.unique)
  end
  local account = tenant_account(record.tenant)
  account.bytes = account.bytes + record.bytes
  return "ok"
end

local reply = {"redriven"}
for i = ids, #ARGV do
  reply[#reply + 1] = redrive(ARGV[i])
end
save_accounts()
save_queue()
wake()
return reply
