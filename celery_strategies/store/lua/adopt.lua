-- Agree on how a queue's jobs are sorted: the first worker says, the others have to agree while anything is sorted.
--
-- KEYS[1] policy hash: order, single, key, weight, caps, weights
-- KEYS[2] state hash: counters of the sorted jobs
-- KEYS[3] caps hash: 'k' .. key or '*' -> number
-- KEYS[4] weights hash: '!k' .. key -> number
-- KEYS[5] lease hash: who reads a queue that has a single active consumer
-- ARGV[1] order text: fair, batch, age or turn; '' = none of its own: read the policy only
-- ARGV[2] single number: 1 = one job of a key at a time
-- ARGV[3] key text: name of the header with the key
-- ARGV[4] weight text: name of the header with the weight, or ''
-- ARGV[5] renew number: 1 = replace a policy under which nothing is sorted
-- ARGV[6+] caps: field, number, ...
-- Returns {agreed, order, single, key, weight, led, changed}: agreed is 0 if another policy is in force, which follows; led is 1
--   if somebody has the lease of the queue; changed is 1 if the caps are not what they were: keys that were full may not be any more
-- Invariant: a policy never changes while jobs are sorted by it
local wanted = {ARGV[1], ARGV[2], ARGV[3], ARGV[4]}
local found = call('HMGET', KEYS[1], 'order', 'single', 'key', 'weight')
local led = soft('HEXISTS', KEYS[5], 'worker') or 0
if wanted[1] == '' then
  return {1, found[1] or '', found[2] or '', found[3] or '', found[4] or '', led}
end
local same = true
for i = 1, 4 do
  same = same and found[i] == wanted[i]
end
if found[1] and not same then
  local jobs = call('HGET', KEYS[2], 't')
  if ARGV[5] ~= '1' or (jobs and tonumber(jobs) > 0) then
    return {0, found[1], found[2] or '', found[3] or '', found[4] or '', led}
  end
end
local before, caps, changed = call('HGETALL', KEYS[3]), {}, 0
-- Nothing is written that is there already: a worker must be able to start when memory is full.
if not same then
  call('HSET', KEYS[1], 'order', wanted[1], 'single', wanted[2], 'key', wanted[3], 'weight', wanted[4])
end
for i = 6, #ARGV, 2 do
  caps[ARGV[i]] = ARGV[i + 1]
end
for i = 1, #before, 2 do
  if byte(before[i]) ~= 33 then
    if caps[before[i]] ~= before[i + 1] then
      call('HDEL', KEYS[3], before[i])
      changed = 1
    else
      caps[before[i]] = nil
    end
  end
end
for field, number in pairs(caps) do
  call('HSET', KEYS[3], field, number)
  changed = 1
end
if changed == 1 or not same then
  -- What an operator set outlives a policy.
  call('HSET', KEYS[1], 'caps', call('EXISTS', KEYS[3]), 'weights', call('EXISTS', KEYS[4]))
end
return {1, wanted[1], wanted[2], wanted[3], wanted[4], led, changed}
