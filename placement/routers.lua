#!lua flags=allow-oom
-- Takes or renews a router's lease with its load, and lists the other live routers.
-- KEYS: router, routers.  ARGV: router id, record, lease in ms, prefix of router keys (they share
-- the slot).
-- A router's id is that of its process, so no other router ever takes its lease.
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], 10 * ARGV[3])
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if id ~= ARGV[1] then
    local record = redis.pcall('GET', ARGV[4] .. id)
    if type(record) == 'string' then
      found[#found + 1] = record
    else
      redis.call('SREM', KEYS[2], id)
    end
  end
end
return found
