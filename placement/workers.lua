-- Lists live workers and prunes the dead from the set.
-- KEYS: workers, news.  ARGV: prefix of worker keys (they share the slot), the news that the reader has
-- seen, or '*'.  Behind '*': digests of the links that the reader has.
-- Returns the news, and nothing else if the reader has seen them.  Otherwise also a string of four words
-- for each worker: its remaining lease in ms, the bytes of its record, the bytes of its links if the reader
-- has to get them or 0, and their digest or '-'.  A last string has these bytes of all workers, because a
-- reader in Python needs about as long for each part of a reply as for a worker's record.
local function news()
  local known = redis.call('HMGET', KEYS[2], 'epoch', 'count')
  return (known[1] or '') .. ' ' .. (known[2] or '')
end
local with_links = ARGV[2] == '*'
local before = news()
if before ~= ' ' and before == ARGV[2] then
  return {before}
end
local has = {}
for at = 3, #ARGV do
  has[ARGV[at]] = true
end
local words, found = {}, {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = ARGV[1] .. id
  local held = redis.pcall('HMGET', key, 'record', 'digest')
  local left = redis.call('PTTL', key)
  if type(held[1]) == 'string' and left > 0 then
    local digest, links = held[2] or '', ''
    if digest ~= '' and with_links and not has[digest] then
      links = redis.call('HGET', key, 'links') or ''
    end
    words[#words + 1] = table.concat({left, #held[1], #links, digest == '' and '-' or digest}, ' ')
    found[#found + 1] = held[1]
    found[#found + 1] = links
  elseif left == -2 then
    redis.call('SREM', KEYS[1], id)
    redis.pcall('HINCRBY', KEYS[2], 'count', 1) -- a full Redis refuses it
  end
end
return {news(), table.concat(words, ' '), table.concat(found)}
