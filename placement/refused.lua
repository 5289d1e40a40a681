-- Adds requests under which engines died, drops expired and excess ones, and lists the rest.
-- KEYS: refused.  ARGV: most, then digest, ms left, digest, ...
-- Returns a flat list: digest, ms left, digest, ...
-- Existing ones keep their expiry, so that routers that share them do not prolong it.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for at = 2, #ARGV, 2 do
  redis.call('ZADD', KEYS[1], 'NX', now + ARGV[at + 1], ARGV[at])
end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -(ARGV[1] + 1))
local found = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for at = 2, #found, 2 do
  found[at] = math.floor(found[at] - now)
end
if #found > 0 then
  redis.call('PEXPIRE', KEYS[1], found[#found])
end
return found
