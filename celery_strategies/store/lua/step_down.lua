-- Give up the leases of queues that this worker has no job of.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] leases set: bases of the queues whose lease it has
-- ARGV[1] worker id
-- Returns number of leases that it still has
-- Invariant: a job in flight keeps the lease
call('DEL', KEYS[1])
local root, left = sub(KEYS[1], 1, -8), 0
for _, base in ipairs(call('SRANDMEMBER', KEYS[2], 1000)) do
  if soft('HGET', base .. 'lease', 'tag') and soft('HGET', base .. 'lease', 'worker') == ARGV[1] then
    left = left + 1
  else
    give_up_lease(root, base, ARGV[1])
    call('SREM', KEYS[2], base)
  end
end
return left
