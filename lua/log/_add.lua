-- Shared by the scripts that append: adds one entry.
-- includes: log/_entry

-- An entry that was added and removed again has left its id behind: the stream takes none below it.
local function add(offset, ...)
  local reply = redis.pcall("XADD", stream, id_of(offset), ...)
  if type(reply) == "table" and string.find(reply.err, "equal or smaller", 1, true) then
    return {"broken", "no entry at its last id: something has added an entry and removed it"}
  elseif type(reply) == "table" then
    return reply
  end
end

-- A batch; its codec and its columns are the arguments from `at` on.
local function add_batch(from_offset, to_offset, from, to, at)
  return add(to_offset, "first", string.format("%.0f", from_offset), "from", from, "to", to, "codec", ARGV[at],
    "ids", ARGV[at + 1], "keys", ARGV[at + 2], "actions", ARGV[at + 3], "objects", ARGV[at + 4],
    "data", ARGV[at + 5], "headers", ARGV[at + 6], "times", ARGV[at + 7])
end
