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
local count, moved, bytes, stuck, failure = tonumber(ARGV[1]), 0, 0, 0, nil
-- One at a time where they are large.
while moved < count and stuck < 64 and bytes < 262144 do
  local chunk = math.min(count - moved, moved > 0 and bytes < 4096 * moved and 8 or 1)
  local members = call('ZRANGEBYSCORE', KEYS[2], '-inf', limit, 'LIMIT', stuck, chunk)
  if #members == 0 then
    break
  end
  for i = 1, #members do
    local _, stop, list = find(members[i], '^%d+:(%d)r?:')
    local length
    -- What is none of ours goes to the first list: whoever reads that sets it aside.
    length, failure = soft('LPUSH', KEYS[3 + tonumber(list or 0)], sub(members[i], (stop or 0) + 1))
    if length then
      call('ZREM', KEYS[2], members[i])
      moved = moved + 1
    else
      -- It waits for an operator, and the others do not.
      stuck = stuck + 1
    end
    bytes = bytes + #members[i]
  end
end
return moved == 0 and failure and redis.error_reply(failure) or moved
