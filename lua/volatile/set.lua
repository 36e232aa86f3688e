-- Set fields: all of them, each with the same time to live.
-- includes: volatile/_fields
-- keys: fields, times
-- args: native:int, ttl:int, items...
-- returns: {"set", new, "native" | "sorted-set", created} | {"foreign", key}
--
-- An item is 2 arguments: field, value.  `ttl` is in milliseconds; -1 is for ever.  `new` counts fields that were not live before; `created` is 1
-- if there was no hash.
-- `native` is 1 if the server's own times to live are to be used: for fields whose deadline is not in `times` already.
-- Two fields that are over are deleted for each that is set: without recruits the hash does not grow for ever.
-- Cost: O(items × log fields).

local deadline = as_score(deadline_after(ttl))
local names, values = {}, {}
for i = items, #ARGV, 2 do
  names[#names + 1], values[#values + 1] = ARGV[i], ARGV[i + 1]
end
local scores = read_scores(names)

local function count_live()
  local live = 0
  for _, each in pairs(read_deadlines(native == 1 and names or existing(names))) do
    live = live + (is_live(each) and 1 or 0)
  end
  return live
end

-- The deadlines come first: if the server then refuses the values, those that were there before are put back.
local function set_indexed(chosen)
  local items, marks = {}, {}
  for k, i in ipairs(chosen) do
    items[2 * k - 1], items[2 * k] = names[i], values[i]
    marks[2 * k - 1], marks[2 * k] = deadline, names[i]
  end
  redis.call("ZADD", times, unpack(marks))
  local reply = redis.pcall("HSET", fields, unpack(items))
  if type(reply) == "table" and reply.err then
    for _, i in ipairs(chosen) do
      if scores[i] then
        redis.call("ZADD", times, scores[i], names[i])
      else
        redis.call("ZREM", times, names[i])
      end
    end
    error(reply.err, 0)
  end
end

-- With FXX and a field that cannot be, it changes nothing.  False if the server has no such command: the client has asked another one.
local function set_native(items, condition)
  local command = {"HSETEX", fields, "PXAT", deadline, "FIELDS", #items / 2}
  if condition then
    table.insert(command, 3, condition)
  end
  for _, item in ipairs(items) do
    command[#command + 1] = item
  end
  local reply = redis.pcall(unpack(command))
  if type(reply) == "table" and reply.err then
    if is_unknown_command(reply.err) then
      return false
    end
    error(reply.err, 0)
  end
  return true
end

rehearse(true)
local new = #names - count_live()
local is_native = native == 1 and ttl > 0 and set_native({"", ""}, "FXX")
forget_lost_hash()

local indexed, items = {}, {}
for i, name in ipairs(names) do
  if is_native and not scores[i] then
    items[#items + 1], items[#items + 2] = name, values[i]
  else
    indexed[#indexed + 1] = i
  end
end
if #indexed > 0 then
  set_indexed(indexed)
end
if #items > 0 then
  set_native(items)
end
reap(2 * #names)
return {"set", new, is_native and "native" or "sorted-set", types[1] == "none" and 1 or 0}
