-- Put back what a dead worker held, some at a time, and forget the worker.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] unacked hash: Kombu's records
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4] alive zset: worker -> milliseconds of its last beat
-- KEYS[5] holder hash of the dead: tag -> place
-- KEYS[6] entry hash of the dead: what it said of itself
-- ARGV[1] worker id of the dead
-- ARGV[2] beat milliseconds: the last beat that the caller saw
-- ARGV[3] session text: channel of its session, which must be gone; '' = its silence is enough
-- ARGV[4] most number of workers that may die of a message, 0 = any
-- ARGV[5] count number of messages at most
-- Returns {messages put back, entries left, entries dealt with}; {-1, 0, 0} if the worker lives, or somebody else buried it
-- Invariant: every message is in its new place before its record goes; a worker that lives is left alone
call('DEL', KEYS[1])
local beat = call('ZSCORE', KEYS[4], ARGV[1])
if not beat or tonumber(beat) ~= tonumber(ARGV[2])
    or ARGV[3] ~= '' and tonumber(call('PUBSUB', 'NUMSUB', ARGV[3])[2]) > 0 then
  return {-1, 0, 0}
end
local root = sub(KEYS[1], 1, -8)
local function holds()
  return call('HLEN', KEYS[5]) - call('HEXISTS', KEYS[5], '')
end
local before, moved = holds(), 0
-- Any of them: a cursor that begins anew in each call would pass by ever more empty places.
local entries = call('HRANDFIELD', KEYS[5], ARGV[5], 'WITHVALUES')
for i = 1, #entries, 2 do
  if entries[i] ~= '' then
    if moving().give_back(root, KEYS[2], KEYS[3], KEYS[5], entries[i], entries[i + 1], 1001, tonumber(ARGV[4])) then
      moved = moved + 1
    end
  end
end
save_all()
local left = holds()
if left == 0 then
  -- After its jobs are back, so that whoever leads next finds them first.
  give_up_leases(root, ARGV[1])
  forget_consumer(root, KEYS[6], ARGV[1])
  call('DEL', KEYS[5], KEYS[6])
  call('ZREM', KEYS[4], ARGV[1])
end
return {moved, left, before - left}
