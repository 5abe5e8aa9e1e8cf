-- Say that jobs are still in good hands, so that their permits do not expire.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] limited hash: tag -> 'number:duration:limit'
-- ARGV[1] ttl milliseconds of `limited`
-- ARGV[2] now microseconds or ''
-- ARGV[3+] tags: one each
-- Returns number of permits that had expired: those jobs run, so they count again, be it one too many
-- Invariant: a permit that was given up is not brought back
local L = limits()
local milliseconds_now, is_error, occupy = L.milliseconds_now, L.is_error, L.occupy
call('DEL', KEYS[1])
local root, now, late = sub(KEYS[1], 1, -8), milliseconds_now(ARGV[2]), 0
local found = call('HMGET', KEYS[2], unpack(ARGV, 3))
for i = 1, #found do
  local _, _, number, duration, limit = find(found[i] or '', '^(%d+):(%d+):(.*)$')
  local score = number and try('ZSCORE', root .. 'permits:' .. limit, number)
  if number and not is_error(score) then
    if not score or tonumber(score) <= now then
      late = late + 1
    end
    occupy(root, limit, number, tonumber(duration), now)
  end
end
call('PEXPIRE', KEYS[2], ARGV[1])
return late
