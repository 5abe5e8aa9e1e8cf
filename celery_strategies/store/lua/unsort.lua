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
local moved, bytes, count = 0, 0, tonumber(ARGV[1])
while moved < count and bytes < 262144 do
  local element = call('LINDEX', KEYS[3], 0)
  if not element then
    break
  end
  local _, stop, list = find(element, '^(%d):')
  call('RPUSH', KEYS[4 + tonumber(list or 0)], sub(element, (stop or 0) + 1))
  call('LPOP', KEYS[3])
  moved, bytes = moved + 1, bytes + #element
end
if moved > 0 then
  return moved
end
while moved < count and bytes < 262144 do
  local member = call('ZREVRANGE', KEYS[2], 0, 0)[1]
  if not member then
    break
  end
  local _, stop, list = find(member, '^(%d):%d+:%d+:')
  call('RPUSH', KEYS[4 + tonumber(list or 0)], sub(member, (stop or 0) + 1))
  call('ZREM', KEYS[2], member)
  moved, bytes = moved + 1, bytes + #member
end
return moved
