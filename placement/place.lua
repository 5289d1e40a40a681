#!lua
-- Writes a request's placement and its place in the list of running or of ended ones, together.
-- KEYS: request, running, ended.  ARGV: request id, attempt, router id, state, record, lifetime in
-- ms, most ended ones to keep, prefixes of placement keys and of router keys (they share the
-- slot), 1 if the router has held the id since the request began.
-- While a record is running, no older attempt overwrites it, and no other router while its own router's
-- lease holds. An ended one may be replaced by the next request with the id, but not by a router that
-- lost it to the router that ended it. A request that ends before its first attempt replaces no other
-- router's record: it never ran, and its router may not know the id's owner. A full Redis refuses this
-- script as a whole. A value of another kind is not ours, and stays.
local held = redis.pcall('HMGET', KEYS[1], 'attempt', 'state', 'router')
if held.err then
  return 'foreign'
end
local attempt = tonumber(held[1])
if attempt then
  if held[3] ~= ARGV[3] then
    local runs = held[2] == 'running'
    local never_ran = ARGV[2] == '0' and ARGV[4] ~= 'running'
    local is_theirs = runs and redis.call('EXISTS', ARGV[9] .. held[3]) == 1
    if is_theirs or never_ran or not runs and ARGV[10] == '1' then
      return 'duplicate'
    end
  end
  if held[3] == ARGV[3] and held[2] == 'running' and attempt > tonumber(ARGV[2]) then
    return 'stale'
  end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local list, other = KEYS[2], KEYS[3]
if ARGV[4] ~= 'running' then
  list, other = other, list
end
redis.call('HSET', KEYS[1], 'attempt', ARGV[2], 'router', ARGV[3], 'state', ARGV[4], 'record', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('ZREM', other, ARGV[1])
redis.call('ZADD', list, now + ARGV[6], ARGV[1])
if redis.call('PTTL', list) < tonumber(ARGV[6]) then -- without writers, it expires with its last one
  redis.call('PEXPIRE', list, ARGV[6])
end
for _, ids in ipairs({KEYS[2], KEYS[3]}) do
  redis.call('ZREMRANGEBYSCORE', ids, '-inf', now)
end
-- Drops two of those that would expire first for each new one: an excess shrinks without a long wait.
if redis.call('ZCARD', KEYS[3]) > tonumber(ARGV[7]) then
  local oldest = redis.call('ZPOPMIN', KEYS[3], 2)
  for i = 1, #oldest, 2 do
    redis.call('DEL', ARGV[8] .. oldest[i])
  end
end
return 'placed'
