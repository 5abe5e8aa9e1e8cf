-- Set one held message aside, with the reason, for an operator to look at.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] unacked hash: Kombu's records
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4] holder hash: tag -> place
-- KEYS[5] set_aside stream: reason, list, worker, message
-- ARGV[1] tag text
-- ARGV[2] suffix text of the record
-- ARGV[3] reason text
-- ARGV[4] worker id
-- Returns id of the stream entry, '' if this worker did not hold the message
-- Invariant: the stream has the message before its record goes
call('DEL', KEYS[1])
local tag = ARGV[1]
local place = call('HGET', KEYS[4], tag)
local raw = place and raw_of(KEYS[2], KEYS[3], tag, ARGV[2])
if not raw then
  settle(sub(KEYS[1], 1, -8), KEYS[2], KEYS[3], KEYS[4], {'\2' .. tag})
  save_all()
  return ''
end
local list = string.match(place, '^(%d+):')
local id = call('XADD', KEYS[5], '*', 'reason', ARGV[3], 'list', list, 'worker', ARGV[4], 'message', raw)
settle(sub(KEYS[1], 1, -8), KEYS[2], KEYS[3], KEYS[4], {tag})
save_all()
return id
