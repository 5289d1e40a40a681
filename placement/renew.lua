-- Renews a worker's lease and replaces its record, if the same life still holds it.
-- KEYS: worker, workers.  ARGV: worker id, incarnation, record, lease in ms.
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if not holder then
  return 'missing'
end
if holder ~= ARGV[2] then
  return 'superseded'
end
redis.call('HSET', KEYS[1], 'record', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
return 'renewed'
