-- Give messages back to Kombu's lists: they become the next to run there. First what was sorted, then what was given back.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] returned zset: list * 2^47 + place -> list:place:deliveries:message
-- KEYS[3] unsorted list: 'level:message', the first to run at the right
-- KEYS[4+] inbox lists 0 to 9
-- ARGV[1] count number of messages to move at most
-- Returns number of messages moved
-- Invariant: the last to run goes first, so that it can be interrupted anywhere and the order holds
call('DEL', KEYS[1])
local elements, moved = call('LRANGE', KEYS[3], 0, tonumber(ARGV[1]) - 1), 0
for i = 1, #elements do
  local _, stop, list = find(elements[i], '^(%d):')
  call('RPUSH', KEYS[4 + tonumber(list)], sub(elements[i], stop + 1))
end
call('LTRIM', KEYS[3], #elements, -1)
if #elements > 0 then
  return #elements
end
local members = call('ZREVRANGE', KEYS[2], 0, tonumber(ARGV[1]) - 1)
for i = 1, #members do
  local _, stop, list = find(members[i], '^(%d+):%d+:%d+:')
  call('RPUSH', KEYS[4 + tonumber(list)], sub(members[i], stop + 1))
  call('ZREM', KEYS[2], members[i])
end
return #members
