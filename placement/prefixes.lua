#!lua
-- Adds a router's notes of beginnings, and returns those that others have added since it last looked.
-- KEYS: notes (a stream), state (a hash).  ARGV: router id, the epoch and the last id that it has read,
-- both empty at first, notes or '', most bytes of notes.
-- Returns {epoch, last id read, 1 if more follow, notes, ms since they were written, notes, ...}.
-- An epoch begins when Redis has lost notes or state: all routers then write their notes again. Its
-- name begins with the router that found the loss.
local most_read, most_entries, keep_ms = 65536, 256, 3600000
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local state = redis.call('HMGET', KEYS[2], 'epoch', 'bytes')
local epoch, bytes = state[1], tonumber(state[2] or 0)
if not epoch or bytes > 0 and redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('DEL', KEYS[1], KEYS[2])
  epoch, bytes = ARGV[1] .. ' ' .. now, 0
end
if ARGV[4] ~= '' then
  redis.call('XADD', KEYS[1], '*', 'router', ARGV[1], 'notes', ARGV[4])
  bytes = bytes + #ARGV[4]
  while bytes > tonumber(ARGV[5]) do
    local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
    redis.call('XDEL', KEYS[1], oldest[1])
    bytes = bytes - #oldest[2][4]
  end
end
redis.call('HSET', KEYS[2], 'epoch', epoch, 'bytes', bytes)
redis.call('PEXPIRE', KEYS[1], keep_ms)
redis.call('PEXPIRE', KEYS[2], keep_ms)
local read, more, size = ARGV[3], 0, 0
if epoch ~= ARGV[2] or read == '' then
  read = '0-0'
end
local found = {epoch, read, 0}
local entries = redis.call('XRANGE', KEYS[1], '(' .. read, '+', 'COUNT', most_entries)
for _, entry in ipairs(entries) do
  if size >= most_read then
    more = 1
    break
  end
  found[2] = entry[1]
  if entry[2][2] ~= ARGV[1] then
    local notes = entry[2][4]
    size = size + #notes
    found[#found + 1] = notes
    found[#found + 1] = math.max(0, now - tonumber(string.match(entry[1], '^%d+')))
  end
end
if #entries == most_entries then
  more = 1
end
found[3] = more
return found
