-- Requeue one held message at the tail of its level, marked as redelivered.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] unacked hash: Kombu's records
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4] holder hash: tag -> place
-- KEYS[5] inbox list: where the message goes, at the left
-- ARGV[1] tag text
-- ARGV[2] suffix text of the record
-- Returns 1 if it was requeued, 0 if this worker did not hold it
-- Invariant: the inbox has the message before its record goes
call('DEL', KEYS[1])
local tag = ARGV[1]
local raw = call('HEXISTS', KEYS[4], tag) == 1 and raw_of(KEYS[2], KEYS[3], tag, ARGV[2])
if not raw then
  settle(sub(KEYS[1], 1, -8), KEYS[2], KEYS[3], KEYS[4], {'\2' .. tag})
  save_all()
  return 0
end
-- Insert the mark into the last delivery_info, where Kombu writes it; keep the bytes if that is not it.
local text = raw
if not find(raw, '"redelivered"', 1, true) then
  local from, last = 1, nil
  while true do
    local start, stop = find(raw, '"delivery_info"%s*:%s*{', from)
    if not start then
      break
    end
    last, from = stop, stop + 1
  end
  if last then
    local empty = find(raw, '^%s*}', last + 1)
    text = sub(raw, 1, last) .. '"redelivered": true' .. (empty and '' or ', ') .. sub(raw, last + 1)
  end
  local reason, message = problem(text)
  if reason or message.properties.delivery_info.redelivered ~= true then
    text = raw
  end
end
call('LPUSH', KEYS[5], text)
settle(sub(KEYS[1], 1, -8), KEYS[2], KEYS[3], KEYS[4], {tag})
save_all()
return 1
