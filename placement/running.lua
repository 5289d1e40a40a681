-- Lists placements of running requests and prunes those whose record has expired.
-- KEYS: running.  ARGV: what placement keys begin with (they share the slot).
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.pcall('HGET', ARGV[1] .. id, 'record')
  if type(record) == 'string' then
    found[#found + 1] = record
  elseif not record then
    redis.call('SREM', KEYS[1], id)
  end
end
return found
