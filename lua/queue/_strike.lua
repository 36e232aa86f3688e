-- Takes messages out of the middle of a tenant's line, for delete.lua and sweep.lua.
-- includes: queue/_line

local LOOKS = 20

-- The rank of the last message of a key before a member of the line, or a little more if that is far, or its record is lost.
local function last_before(account, record, member)
  save_lines()
  local start, rank = "[" .. account.tenant .. "\0", 0
  for _, other in ipairs(redis.call("ZREVRANGEBYLEX", waiting, "(" .. member, start, "LIMIT", 0, LOOKS)) do
    local id, _, rank_before = parse_waiting(other)
    rank = rank_before
    local found = read_record(id)
    if not found or found.key == record.key then
      break
    end
  end
  return rank
end

-- Takes a message out of the middle of its tenant's line: the line has got no further, and the next of its key follows those left.
local function strike_out(account, id, record)
  local member = waiting_member(id, record)
  quit_line(account, member)
  mark_moved(account)
  if record.suspect == IS_APART then
    if gating then
      gating.leave(gating.find(record), record)
    end
  elseif record.generation == queue.generation then
    local last, waits = read_lane(account, record)
    if last == rank_of(record) and waits > 1 and not record.held then
      last = last_before(account, record, member)
    end
    save_lane(account, record, last, waits - 1)
    account.waits = account.waits - 1
    if gating then
      gating.leave(gating.find(record), record)
    end
  end
end
