#!lua
-- Keeps an answer for a while; beyond a number of answers, or a sum of their bytes, those that expire
-- first are dropped.
-- KEYS: answer, answers (ids by expiry), sizes (bytes by id, the sum under ''), request.
-- ARGV: request id, digest of the request, response, ms to keep it, most answers, most bytes,
-- prefixes of answer keys and of router keys (they share the slot), the router if it has held the id
-- since the request began, or ''. Such a router has lost it to one that lives or has ended it.
local held = redis.pcall('HMGET', KEYS[4], 'router', 'state') -- a value of another kind has no owner
if ARGV[9] ~= '' and held[1] and held[1] ~= ARGV[9] then
  if held[2] ~= 'running' or redis.call('EXISTS', ARGV[8] .. held[1]) == 1 then
    return 'duplicate'
  end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function drop(id)
  local size = redis.call('HGET', KEYS[3], id)
  if size then
    redis.call('HINCRBY', KEYS[3], '', -size)
    redis.call('HDEL', KEYS[3], id)
  end
  redis.call('ZREM', KEYS[2], id)
  redis.call('DEL', ARGV[7] .. id)
end

-- Redis may have evicted only the list; then its sizes would stay in the sum for ever.
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('DEL', KEYS[3])
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  drop(id)
end
drop(ARGV[1])
redis.call('HSET', KEYS[1], 'digest', ARGV[2], 'response', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], #ARGV[3])
local bytes = redis.call('HINCRBY', KEYS[3], '', #ARGV[3])
local count = redis.call('ZCARD', KEYS[2])
while count > tonumber(ARGV[5]) or bytes > tonumber(ARGV[6]) do
  drop(redis.call('ZRANGE', KEYS[2], 0, 0)[1])
  bytes = tonumber(redis.call('HGET', KEYS[3], ''))
  count = count - 1
end
-- Routers may keep answers for different times: the lists last as long as the longest.
for _, key in ipairs({KEYS[2], KEYS[3]}) do
  redis.call('PEXPIRE', key, math.max(ARGV[4], redis.call('PTTL', key)))
end
return 'kept'
