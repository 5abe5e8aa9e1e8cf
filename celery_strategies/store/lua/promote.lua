-- Move delayed messages that are due to the tails of their lists, in the order in which they are due.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] delayed zset: milliseconds -> 'sequence:list:message'
-- KEYS[3+] inbox lists 0 to 9
-- ARGV[1] count number of messages at most
-- ARGV[2] now microseconds or '', 'all' = whatever their time
-- Returns number of messages moved
-- Invariant: the list has the message before the set loses it
call('DEL', KEYS[1])
local limit = ARGV[2] == 'all' and '+inf' or int(clock(ARGV[2]) / 1000)
local moved, bytes = 0, 0
-- One at a time where they are large.
while moved < tonumber(ARGV[1]) and bytes < 262144 do
  local members = call('ZRANGEBYSCORE', KEYS[2], '-inf', limit, 'LIMIT', 0, bytes < 4096 * (moved + 1) and 8 or 1)
  if #members == 0 then
    break
  end
  for i = 1, #members do
    local _, stop, list = find(members[i], '^%d+:(%d)r?:')
    if stop then
      call('LPUSH', KEYS[3 + tonumber(list)], sub(members[i], stop + 1))
    else
      -- None of ours: whoever reads the list sets it aside.
      call('LPUSH', KEYS[3], members[i])
    end
    bytes = bytes + #members[i]
  end
  call('ZREM', KEYS[2], unpack(members))
  moved = moved + #members
end
return moved
