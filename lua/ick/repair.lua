-- Repair a damaged Ick without losing a member: a key with foreign content is renamed, never deleted.
-- keys: version, dirty, reserved, fence, held, aside_version, aside_dirty, aside_reserved, aside_fence, aside_held
-- args: carry_out:int
-- returns: {"damages", what, found, …} | {"newer", format}
--
-- `what` names a key with foreign content, `found` is its type or its first bytes; "unversioned" means members without a
-- version.  With carry_out = 0 nothing is written.  A version of a later format is left alone, because its members may
-- mean something else.  Cost: O(1).

local FORMAT = "ick.v1"
local answer = {"damages"}

local function move_aside(key, aside, what, found)
  answer[#answer + 1] = what
  answer[#answer + 1] = found
  if carry_out == 1 then
    redis.call("RENAME", key, aside)
  end
end

local format = ""
if redis.call("TYPE", version).ok == "string" then
  format = redis.call("GET", version)
  if format ~= FORMAT and string.match(format, "^ick%.v%d+$") then
    return {"newer", format}
  end
end

local function foreign(key, expected)
  local found = redis.call("TYPE", key).ok
  return found ~= "none" and found ~= expected and found or nil
end

local members = 0
for _, set in ipairs({{dirty, aside_dirty, "dirty"}, {reserved, aside_reserved, "reserved"}, {held, aside_held, "held"}}) do
  local found = foreign(set[1], "zset")
  if found then
    move_aside(set[1], set[2], set[3], found)
  elseif set[1] ~= held then
    members = members + redis.call("ZCARD", set[1])
  end
end

local fence_type = foreign(fence, "hash")
if fence_type then
  move_aside(fence, aside_fence, "fence", fence_type)
elseif redis.call("EXISTS", fence) == 1 and not tonumber(redis.call("HGET", fence, "number") or "") then
  move_aside(fence, aside_fence, "fence", "no number")
end

local version_type = foreign(version, "string")
if version_type or (format ~= "" and format ~= FORMAT) then
  move_aside(version, aside_version, "version", version_type or string.sub(format, 1, 40))
elseif redis.call("EXISTS", version) == 1 and format == "" then
  move_aside(version, aside_version, "version", "empty")
elseif redis.call("EXISTS", version) == 0 and members > 0 then
  answer[#answer + 1] = "unversioned"
  answer[#answer + 1] = string.format("%.0f", members)
end

if carry_out == 1 and #answer > 1 then
  redis.call("SETNX", version, FORMAT)
end
return answer
