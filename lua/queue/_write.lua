-- Shared by the scripts that write messages: one message, with its unique name.
-- includes: queue/_moves
--
-- A message is 11 arguments: id, tenant, key, hand, due, deadline, unique, scope, window, payload, headers.  Times are milliseconds
-- since 1970, or from now with a "+"; "" is none.  `hand` is the numbers of its streams.  A result is "written"; "known": the id is,
-- as after a lost reply; "taken": by another tenant; "duplicate <id>" of another message of this unique name; "windowed <id>" if that holds the name for a time;
-- "full <bytes> <limit>" of the tenant; or "damaged": no stream can be written.

local WIDTH, aged = 11, {}

local function moment(text)
  if string.sub(text, 1, 1) == "+" then
    return now + tonumber(string.sub(text, 2))
  end
  return number(text)
end

local function reserve_unique(id, record, window)
  redis.call("HSET", uniques, record.unique, id)
  redis.call("ZREM", windows, record.unique)
  if record.scope == "window" then
    redis.call("ZADD", windows, string.format("%.0f", now + number(window)), record.unique)
  end
end

local function write_message(is_numbered, id, tenant, key, hand, due, deadline, unique, scope, window, payload, headers)
  local known = read_record(id)
  if known then
    return known.tenant == tenant and "known" or "taken"
  end
  local other = unique ~= "" and holder_of(unique)
  if other then
    return (redis.call("ZSCORE", windows, unique) and "windowed " or "duplicate ") .. other
  end
  local account = tenant_account(tenant)
  local max_bytes = account.limits.bytes
  if max_bytes and account.bytes + #payload > max_bytes then
    return string.format("full %.0f %.0f", account.bytes, max_bytes)
  end
  queue.sequence = queue.sequence + 1
  local record = {
    state = "w", tenant = tenant, key = key, stream = -1, entry = "", rank = "", attempts = 0, token = "", charge = 0,
    bytes = #payload, unique = unique, scope = scope, deadline = moment(deadline), since = now, hand = hand,
    generation = queue.generation, taken = 0, at = now, advance = 0, order = is_numbered and number(id) or queue.sequence,
    suspect = 0, company = 0,
  }
  local due_at = moment(due)
  if due_at > now then
    record.since = due_at
    park(id, record, "d", due_at, "", payload, headers)
  elseif enqueue(id, record, payload, headers) then
    watch_deadline(id, record)
  else
    return "damaged"
  end
  account.bytes = account.bytes + record.bytes
  aged[#aged + 1], aged[#aged + 2] = record.since, id
  if unique ~= "" then
    reserve_unique(id, record, window)
  end
  return "written"
end

-- Writes the messages in ARGV from `first` on; returns a result for each after the words of `reply`.  With `is_numbered`, their ids are
-- numbers in the order in which they were staged, in which they need not come.
local function write_messages(first, reply, is_numbered)
  local written, ids, tenants = 0, {}, {}
  for from = first, #ARGV, WIDTH do
    ids[#ids + 1], tenants[#tenants + 1] = ARGV[from], ARGV[from + 1]
  end
  begin_batch(ids)
  fetch_accounts(tenants)
  for from = first, #ARGV, WIDTH do
    local result = write_message(is_numbered, unpack(ARGV, from, from + WIDTH - 1))
    reply[#reply + 1] = result
    written = written + (result == "written" and 1 or 0)
  end
  if #aged > 0 then
    redis.call("ZADD", ages, unpack(aged))
  end
  redis.call("HINCRBY", meta, "written", written)
  save_accounts()
  save_queue()
  if written > 0 then
    wake()
  end
  return reply
end
