-- Give permits that expired to those first in line, where it is time to: nobody may be left who would give them up.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] lines zset: limit -> when to look at its line again, in milliseconds
-- ARGV[1] count number of limits at most
-- ARGV[2] now microseconds or ''
-- Returns {number of messages that got a permit, milliseconds until the next look; -1: there is no line}
-- Invariant: a message that leaves its line has a permit, and is where its queue is read
local milliseconds_now, serve_line = limits().milliseconds_now, limits().serve_line
call('DEL', KEYS[1])
local root, now, served, bytes = sub(KEYS[1], 1, -8), milliseconds_now(ARGV[2]), 0, 0
local due = call('ZRANGEBYSCORE', KEYS[2], '-inf', int(now), 'LIMIT', 0, ARGV[1])
for i = 1, #due do
  if bytes < LINE_BYTES then
    local number, _, size = serve_line(root, due[i], now)
    served, bytes = served + number, bytes + size
  end
end
save_all()
local first = call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
return {served, first and math.max(0, tonumber(first) - now) or -1}
