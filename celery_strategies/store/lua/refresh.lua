-- Say that held messages are still in good hands, so that no visibility timeout ends their delivery.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] unacked_index zset: tag -> seconds
-- KEYS[3] holder hash: tag -> place
-- ARGV[1] ttl milliseconds of the holder
-- ARGV[2] now microseconds or ''
-- ARGV[3+] tags: one each
-- Returns number of tags that are still held
-- Invariant: a tag that is gone is not brought back
call('DEL', KEYS[1])
call('PEXPIRE', KEYS[3], ARGV[1])
local seconds = format('%.6f', clock(ARGV[2]) / 1000000)
local scores, alive = {}, 0
for i = 3, #ARGV do
  if call('ZSCORE', KEYS[2], ARGV[i]) then
    alive = alive + 1
    scores[#scores + 1], scores[#scores + 2] = seconds, ARGV[i]
  end
end
if alive > 0 then
  call('ZADD', KEYS[2], 'XX', unpack(scores))
end
return alive
