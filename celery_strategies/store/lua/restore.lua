-- Put held messages back where they were: head of source, level and key, in the order first taken.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] unacked hash: Kombu's records
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4+] items: per message holder hash, returned zset
-- ARGV[1] limit seconds: only entries whose score is not above it; '' = whatever the score
-- ARGV[2] started number: 1 counts this as a delivery, 0 says that it never started
-- ARGV[3+] items: per message tag, place
-- Returns number of messages put back
-- Invariant: the returned set has the message before its record goes; a place that changed is left alone
call('DEL', KEYS[1])
local unacked, unacked_index, root = KEYS[2], KEYS[3], sub(KEYS[1], 1, -8)
local limit, started, moved = ARGV[1], tonumber(ARGV[2]), 0
for i = 1, (#KEYS - 3) / 2 do
  local holder, returned = KEYS[2 + 2 * i], KEYS[3 + 2 * i]
  local tag, place = ARGV[1 + 2 * i], ARGV[2 + 2 * i]
  local score = call('ZSCORE', unacked_index, tag)
  if call('HGET', holder, tag) == place
      and (limit == '' or (score and tonumber(score) <= tonumber(limit))) then
    local l, sequence, before, weight, key, suffix = sorted_place(place)
    local list, number, deliveries = l, sequence, before
    if not l then
      local _
      _, _, list, number, deliveries, suffix = find(place, '^(%d+):(%d+):(%d+):(.*)$')
    end
    local raw = raw_of(unacked, unacked_index, tag, suffix)
    local q = raw and l and open(base_of(root, suffix))
    deliveries = tonumber(deliveries) + started
    if q then
      put_front(q, l, key, sequence, format('%.0f:%d:%s:', sequence, deliveries, weight) .. raw)
    elseif raw then
      local member = format('%d:%.0f:%d:', list, number, deliveries) .. raw
      call('ZADD', returned, int(tonumber(list) * BAND + tonumber(number)), member)
    end
    if raw then
      settle(root, unacked, unacked_index, holder, {tag})
      moved = moved + 1
    else
      -- No record (its job was acknowledged when it started), or one that is not ours: Kombu's own recovery may find it.
      settle(root, unacked, unacked_index, holder, {'\2' .. tag})
    end
  end
end
save_all()
return moved
