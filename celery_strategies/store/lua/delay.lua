-- Put a held message where it waits until it is due.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] unacked hash: Kombu's records
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4] holder hash: tag -> place
-- KEYS[5] delayed zset: milliseconds -> 'sequence:list:message', 'r' after the list: it waits for a rate limit
-- KEYS[6] sequence string: counter
-- ARGV[1] tag text
-- ARGV[2] suffix text of the record
-- ARGV[3] due milliseconds since the epoch
-- ARGV[4] mark text: 'r' or ''
-- Returns 1 if it was put there, 0 if this worker did not hold it
-- Invariant: the message is in its new place before its record goes
call('DEL', KEYS[1])
local root, tag = sub(KEYS[1], 1, -8), ARGV[1]
local place = call('HGET', KEYS[4], tag)
local raw = place and raw_of(KEYS[2], KEYS[3], tag, ARGV[2])
if not raw then
  settle(root, KEYS[2], KEYS[3], KEYS[4], {'\2' .. tag})
  save_all()
  return 0
end
local list = string.match(place, '^(%d+):')
call('ZADD', KEYS[5], ARGV[3], format('%016.0f:%s%s:', call('INCR', KEYS[6]), list, ARGV[4]) .. raw)
settle(root, KEYS[2], KEYS[3], KEYS[4], {tag})
save_all()
return 1
