-- Lists placements of running requests.
-- KEYS: running.  ARGV: prefix of placement keys (they share the slot).
local found = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local record = redis.pcall('HGET', ARGV[1] .. id, 'record')
  if type(record) == 'string' then
    found[#found + 1] = record
  end
end
return found
