#!lua flags=allow-oom
-- Takes or renews a worker's lease for a process, and replaces the worker's record.
-- KEYS: worker, workers, news.  ARGV: worker id, holder, record, lease in ms, 'take' or 'renew', digest of
-- the worker's links or '', links or '', digest of the facts that seldom change.
-- Other facts are news: a reader that has seen all news need not read the workers again.
-- Links are most of a worker's bytes and seldom change, so they come only if this answers 'unknown'.
-- The holder is a process; ids of later ones sort after those of earlier ones. A new process takes
-- the lease from any holder. One that has held it renews it unless a later process has it: a missing
-- or an earlier holder only means that Redis was emptied or restored an earlier state.
-- A full Redis also accepts it, because leases are few and small.
local holder = redis.call('HGET', KEYS[1], 'holder')
if ARGV[5] ~= 'take' and holder and holder > ARGV[2] then
  return 'superseded'
end
if ARGV[6] == '' then
  redis.call('HDEL', KEYS[1], 'digest', 'links')
elseif ARGV[7] ~= '' then
  redis.call('HSET', KEYS[1], 'digest', ARGV[6], 'links', ARGV[7])
elseif redis.call('HGET', KEYS[1], 'digest') ~= ARGV[6] then
  return 'unknown'
end
if redis.call('HGET', KEYS[1], 'facts') ~= ARGV[8] then
  redis.call('HSETNX', KEYS[3], 'epoch', table.concat(redis.call('TIME'), '.'))
  redis.call('HINCRBY', KEYS[3], 'count', 1)
end
redis.call('HSET', KEYS[1], 'holder', ARGV[2], 'record', ARGV[3], 'facts', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
if redis.call('PTTL', KEYS[2]) < 10 * ARGV[4] then -- otherwise it would outlive a fleet whose readers ended first
  redis.call('PEXPIRE', KEYS[2], 10 * ARGV[4])
  redis.call('PEXPIRE', KEYS[3], 10 * ARGV[4])
end
return 'held'
