#!lua flags=allow-oom
-- Takes or renews a worker's lease for a process, and replaces the worker's record.
-- KEYS: worker, workers.  ARGV: worker id, holder, record, lease in ms, 'take' or 'renew'.
-- The holder is a process; ids of later ones sort after those of earlier ones. A new process takes
-- the lease from whoever held it. One that has held it renews it unless a later process has it: what
-- else it finds, nobody or an earlier holder, a Redis shows that was emptied or went back in time.
-- A Redis that is full takes it all the same: leases are few and small.
local holder = redis.call('HGET', KEYS[1], 'holder')
if ARGV[5] ~= 'take' and holder and holder > ARGV[2] then
  return 'superseded'
end
redis.call('HSET', KEYS[1], 'holder', ARGV[2], 'record', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
if redis.call('PTTL', KEYS[2]) < 10 * ARGV[4] then -- else it outlives a fleet whose readers ended first
  redis.call('PEXPIRE', KEYS[2], 10 * ARGV[4])
end
return 'held'
