-- Put held messages back where they were: head of source, level and key, in the order first taken.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] unacked hash: Kombu's records
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4+] items: per message holder hash
-- ARGV[1] limit seconds: only entries whose score is not above it; '' = whatever the score
-- ARGV[2] started number: 1 counts this as a delivery, 0 says that it never started, 1001 that its worker died
-- ARGV[3] most number of workers that may die of a message, 0 = any
-- ARGV[4+] items: per message tag, place
-- Returns number of messages put back; an error if one could not be
-- Invariant: the returned set has the message before its record goes; a place that changed is left alone
call('DEL', KEYS[1])
local unacked, unacked_index, root = KEYS[2], KEYS[3], sub(KEYS[1], 1, -8)
local limit, started, moved, stuck = ARGV[1], tonumber(ARGV[2]), 0, false
for i = 1, #KEYS - 3 do
  local holder = KEYS[3 + i]
  local tag, place = ARGV[2 + 2 * i], ARGV[3 + 2 * i]
  local score = call('ZSCORE', unacked_index, tag)
  if call('HGET', holder, tag) == place
      and (limit == '' or (score and tonumber(score) <= tonumber(limit))) then
    if moving().give_back(root, unacked, unacked_index, holder, tag, place, started, tonumber(ARGV[3])) then
      moved = moved + 1
    else
      stuck = stuck or call('HEXISTS', holder, tag) == 1
    end
  end
end
save_all()
if stuck then
  return redis.error_reply('WRONGTYPE what was given back cannot be written: a message stays where it is')
end
return moved
