-- Say that this worker lives, and name those who have been quiet for long.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] alive zset: worker -> milliseconds of its last beat
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4] holder hash: tag -> place
-- ARGV[1] worker id
-- ARGV[2] quiet milliseconds
-- ARGV[3] ttl milliseconds of the holder
-- ARGV[4] now microseconds or ''
-- ARGV[5+] tags: one for each message held, whose time stamps are renewed
-- Returns {worker, milliseconds, ...}: up to 16 workers whose last beat is older than `quiet`, oldest first
-- Invariant: a tag that is gone is not brought back
call('DEL', KEYS[1])
local now = clock(ARGV[4])
call('ZADD', KEYS[2], int(now / 1000), ARGV[1])
call('PEXPIRE', KEYS[4], ARGV[3])
local seconds, scores = format('%.6f', now / 1000000), {}
for i = 5, #ARGV do
  scores[#scores + 1], scores[#scores + 2] = seconds, ARGV[i]
end
if #scores > 0 then
  call('ZADD', KEYS[3], 'XX', unpack(scores))
end
return call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. int(now / 1000 - ARGV[2]), 'WITHSCORES', 'LIMIT', 0, 16)
