-- Explain where messages are, and what they wait for; writes nothing.
-- includes: queue/_bodies, queue/_gates
-- keys: queue/_keys
-- args: ids...
-- returns: {"explained", {name, value, …} | {}, …} | {"lost"} | {"foreign", key}
--
-- Nothing of one that is unknown.  Times are milliseconds from now.  Cost: O(ids × log messages).

if is_lost() then
  return {"lost"}
end

local function explain(id)
  local record = read_record(id)
  if not record then
    return {}
  end
  local account = tenant_account(record.tenant)
  local reply = {}
  local function tell(name, value)
    reply[#reply + 1] = name
    reply[#reply + 1] = type(value) == "number" and string.format("%.3f", value) or tostring(value)
  end

  tell("state", ({w = "waiting", l = "leased", d = "delayed", x = "dead", f = "finished"})[record.state])
  tell("tenant", record.tenant)
  tell("key", record.key)
  tell("attempts", record.attempts)
  tell("age", now - record.since)
  tell("stream", record.stream)
  local gate = record.state == "w" and record.held and gating and gating.find(record)
  if gate then
    local ends = limited_until(gate)
    tell("key_is", gate.limits.paused and "paused" or ends and "limited" or "reserved")
    local own = record.held .. "\0" .. record.tenant .. "\0"
    tell("ahead", redis.call("ZLEXCOUNT", waiting, "[" .. own, "(" .. own .. record.rank))
    if tonumber(ends or "inf") < math.huge then
      tell("blocked_for", tonumber(ends) - now)
    end
  elseif record.state == "w" then
    local own = record.tenant .. "\0"
    tell("ahead", redis.call("ZLEXCOUNT", waiting, "[" .. own, "(" .. own .. record.rank))
    tell("turn", redis.call("ZRANK", ready, record.tenant) or -1)
    tell("tenant_is", ({r = "ready", o = "over", b = "blocked"})[account.class] or "idle")
    local score = redis.call("ZSCORE", blocked, record.tenant)
    if score and score ~= "inf" then
      tell("blocked_for", math.max(0, tonumber(score) - now))
    end
  end
  tell("has_name", record.unique ~= "" and redis.call("HGET", uniques, record.unique) == id and 1 or 0)
  tell("in_flight", account.in_flight)
  tell("paused", account.limits.paused and 1 or 0)
  local expiry = redis.call("ZSCORE", leases, id)
  if expiry then
    tell("lease", tonumber(expiry) - now)
    tell("holder", record.token)
  end
  local due = redis.call("ZSCORE", delayed, parked_member(id, record))
  if due then
    tell("due", tonumber(due) - now)
  end
  if record.state == "x" then
    tell("reason", select(3, read_parked(id)) or "its body was deleted from Redis")
  end
  return reply
end

local explained = {"explained"}
for i = ids, #ARGV do
  explained[#explained + 1] = explain(ARGV[i])
end
return explained
