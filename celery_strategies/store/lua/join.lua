-- Open a session: takes of any earlier session of this worker are void from here on.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] holder hash: tag -> place, '' -> session
-- ARGV[1] session number, higher than any before
-- ARGV[2] ttl milliseconds
-- Returns what the holder entries say: tag, place, tag, place, ...
-- Invariant: no entry is changed; a session never gives way to an earlier one, whose call came late
call('DEL', KEYS[1])
local current = call('HGET', KEYS[2], '')
if not current or tonumber(ARGV[1]) > tonumber(current) then
  call('HSET', KEYS[2], '', ARGV[1])
end
call('PEXPIRE', KEYS[2], ARGV[2])
local entries, held = call('HGETALL', KEYS[2]), {}
for i = 1, #entries, 2 do
  if entries[i] ~= '' then
    held[#held + 1], held[#held + 2] = entries[i], entries[i + 1]
  end
end
return held
