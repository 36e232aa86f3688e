-- Whether the limits that hold are those that are declared.
-- includes: queue/_limits
-- args: declared
--
-- `declared` is the version of a declaration, "" for none, and "*" for that which the queue had last.  After a loss, or in an older copy of
-- Redis, another holds: until it is declared again, nothing is written or handed over.

local VERSION = DECLARED .. DECLARED

local function is_undeclared()
  local wanted = declared == "*" and queue.declared or declared
  return wanted ~= (has_limits and redis.call("HGET", limits, VERSION) or "")
end
