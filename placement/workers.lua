-- Lists live workers and prunes the dead from the set.
-- KEYS: workers.  ARGV: prefix of worker keys (they share the slot), then digests of the links that
-- the reader has, or '*' if it needs none.
-- Returns a flat list: record, digest of its links or '', links or '' if the reader has them, remaining
-- lease in ms, record, ...
local has = {}
for at = 2, #ARGV do
  has[ARGV[at]] = true
end
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = ARGV[1] .. id
  local held = redis.pcall('HMGET', key, 'record', 'digest')
  local left = redis.call('PTTL', key)
  if type(held[1]) == 'string' and left > 0 then
    local digest, links = held[2] or '', ''
    if digest ~= '' and not has['*'] and not has[digest] then
      links = redis.call('HGET', key, 'links')
    end
    for _, one in ipairs({held[1], digest, links, left}) do
      found[#found + 1] = one
    end
  elseif left == -2 then
    redis.call('SREM', KEYS[1], id)
  end
end
return found
