-- Have delayed messages that wait for a rate limit come back at once.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] delayed zset: milliseconds -> 'sequence:list:message', 'r' after the list: it waits for a rate limit
-- ARGV[1] cursor number: '0' to begin with, then what the last call returned
-- Returns next cursor, '0' when done
-- Invariant: only the time changes at which a message is due
call('DEL', KEYS[1])
local found = call('ZSCAN', KEYS[2], ARGV[1], 'COUNT', 50)
for i = 1, #found[2], 2 do
  if find(found[2][i], '^%d+:%dr:') then
    call('ZADD', KEYS[2], 'XX', 0, found[2][i])
  end
end
return found[1]
