-- Lists live workers and prunes the dead from the set.
-- KEYS: workers.  ARGV: prefix of worker keys (they share the slot).
-- Returns a flat list: record, remaining lease in ms, record, ...
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = ARGV[1] .. id
  local record = redis.pcall('HGET', key, 'record')
  local left = redis.call('PTTL', key)
  if type(record) == 'string' and left > 0 then
    found[#found + 1] = record
    found[#found + 1] = left
  elseif left == -2 then
    redis.call('SREM', KEYS[1], id)
  end
end
return found
