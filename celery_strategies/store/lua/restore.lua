-- Put held messages back where they were: head of source and level, in the order first taken.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] unacked hash: Kombu's records
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4+] items: per message holder hash, returned zset
-- ARGV[1] limit seconds: only entries whose score is not above it; '' = whatever the score
-- ARGV[2] started number: 1 counts this as a delivery, 0 says that it never started
-- ARGV[3+] items: per message tag, place, record suffix
-- Returns number of messages put back
-- Invariant: the returned set has the message before its record goes; a place that changed is left alone
call('DEL', KEYS[1])
local unacked, unacked_index = KEYS[2], KEYS[3]
local limit, started, moved = ARGV[1], tonumber(ARGV[2]), 0
for i = 1, (#KEYS - 3) / 2 do
  local holder, returned = KEYS[2 + 2 * i], KEYS[3 + 2 * i]
  local tag, place, suffix = ARGV[3 * i], ARGV[3 * i + 1], ARGV[3 * i + 2]
  local score = call('ZSCORE', unacked_index, tag)
  if call('HGET', holder, tag) == place
      and (limit == '' or (score and tonumber(score) <= tonumber(limit))) then
    local raw = raw_of(call('HGET', unacked, tag), suffix)
    if raw then
      local _, _, list, level, number, deliveries = find(place, '^(%d+):(%d+):(%d+):(%d+):')
      local member = format('%s:%s:%d:', list, number, tonumber(deliveries) + started) .. raw
      call('ZADD', returned, int(tonumber(level) * BAND + tonumber(number)), member)
      moved = moved + 1
    end
    settle(unacked, unacked_index, holder, {tag})
  end
end
return moved
