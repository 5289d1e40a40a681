#!lua
-- Claims a request id for a router, unless another live router runs the request or its answer is
-- kept.
-- KEYS: request, running, ended, answer.  ARGV: request id, router id, record, lifetime in ms,
-- digest of the request, prefix of router keys (they share the slot).
-- Returns {'running', record, ms that the other router's lease holds}, {'answered', response} or
-- {'claimed', the record of a router that ran it and is gone, or ''}. A router whose lease
-- has expired owns no placement. If the key has a value of another kind, nothing is written, and no
-- other router's claim is known.
local earlier = ''
local held = redis.pcall('HMGET', KEYS[1], 'router', 'state', 'record')
if held[2] == 'running' and held[1] ~= ARGV[2] then
  local left = redis.call('PTTL', ARGV[6] .. held[1])
  if left > 0 then
    return {'running', held[3], left}
  end
  earlier = held[3] or ''
end
local answer = redis.pcall('HMGET', KEYS[4], 'digest', 'response')
if answer[1] == ARGV[5] and answer[2] then
  return {'answered', answer[2]}
end
if held.err then
  return {'claimed', ''}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'attempt', 0, 'router', ARGV[2], 'state', 'running', 'record', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[1])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[4]) then
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
return {'claimed', earlier}
