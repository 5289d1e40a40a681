-- Takes a worker's lease. A new process takes it from whoever held it; a process that held it before
-- (previous is not empty) only from nobody, from that earlier life of its own, or from this very life:
-- then an earlier call did arrive, and only its answer was late.
-- KEYS: worker, workers.  ARGV: worker id, incarnation, record, lease in ms, previous incarnation.
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and ARGV[5] ~= '' and holder ~= ARGV[5] and holder ~= ARGV[2] then
  return 'superseded'
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'record', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
return 'registered'
