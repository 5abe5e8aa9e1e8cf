-- Give returned messages back to Kombu's lists: they become the next to run there.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] returned zset: list * 2^47 + place -> list:place:deliveries:message
-- KEYS[3+] inbox lists 0 to 9
-- ARGV[1] count number of messages to move at most
-- Returns number of messages moved
-- Invariant: the last of the returned set goes first, so that it can be interrupted anywhere and the order holds
call('DEL', KEYS[1])
local members = call('ZREVRANGE', KEYS[2], 0, tonumber(ARGV[1]) - 1)
for i = 1, #members do
  local _, stop, list = find(members[i], '^(%d+):%d+:%d+:')
  call('RPUSH', KEYS[3 + tonumber(list)], sub(members[i], stop + 1))
  call('ZREM', KEYS[2], members[i])
end
return #members
