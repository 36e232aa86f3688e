-- Limits of tenants and keys.
-- includes: queue/_queue

local has_limits = redis.call("EXISTS", limits) == 1

-- weight, elastic limit, limit in flight, messages a second, burst, bytes, paused; "-" for none
local function parse_limits(text)
  local values = {}
  for word in string.gmatch(text or "", "%S+") do
    values[#values + 1] = tonumber(word) or false
  end
  return {
    weight = values[1] or 1, elastic = values[2], in_flight = values[3], rate = values[4], burst = values[5] or 1,
    bytes = values[6], paused = values[7] == 1,
  }
end

local NO_LIMITS = parse_limits()

-- Before the name of a tenant with declared limits: see declare.lua.
local DECLARED = "\1"

-- A pause of all is one for those with limits of their own as well.
local function limits_of(tenant)
  local found = redis.call("HMGET", limits, tenant, DECLARED .. tenant, "", DECLARED)
  local own, default = found[1] or found[2], found[3] or found[4]
  found = parse_limits(own or default)
  found.paused = found.paused or parse_limits(default).paused
  return found
end
