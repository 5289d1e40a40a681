-- Writes a request's placement and its membership of the running set, together.
-- KEYS: request, running.  ARGV: request id, attempt, router id, state, record, lifetime in ms.
-- While a record says running, no older attempt and no other router overwrites it; an ended one is
-- free for whoever uses the id next.
local held = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'router')
local attempt = tonumber(held[1])
if attempt then
  if held[3] ~= ARGV[3] and held[2] == 'running' then
    return 'duplicate'
  end
  if held[3] == ARGV[3] and held[2] == 'running' and attempt > tonumber(ARGV[2]) then
    return 'stale'
  end
end
redis.call('HSET', KEYS[1], 'attempt', ARGV[2], 'router', ARGV[3], 'state', ARGV[4], 'record', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
if ARGV[4] == 'running' then
  redis.call('SADD', KEYS[2], ARGV[1])
else
  redis.call('SREM', KEYS[2], ARGV[1])
end
return 'placed'
