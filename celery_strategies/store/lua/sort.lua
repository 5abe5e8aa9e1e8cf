-- Sort a queue's new jobs by key, some at a time. One worker sorts a queue; the others leave it to that one.
--
-- KEYS[1] sequence string: counter of deliveries and places
-- KEYS[2] sorter string: the worker that sorts this queue
-- KEYS[3] set_aside stream: reason, list, worker, message
-- KEYS[4] returned zset: what was given back unsorted
-- KEYS[5+] inbox lists
-- ARGV[1] worker id
-- ARGV[2] ttl milliseconds that the sorter may be silent
-- ARGV[3] levels number, 0 = none: each list is one
-- ARGV[4] lists bytes: index of each list
-- ARGV[5] messages number at most
-- ARGV[6] bytes number at most, beyond the first message
-- ARGV[7] now microseconds or ''
-- Returns {left, notes, aside, soon}: messages left, -1 if another worker sorts, -2 if the queue has no policy; notes = text, ...;
--   aside = id, reason, ...; soon = milliseconds until the first message that went to the delayed is due, -1 = none did
-- Invariant: the new place is written before the old one is removed; refused when memory is full
local owner = soft('GET', KEYS[2])
if owner and owner ~= ARGV[1] then
  return {-1, {}, {}, -1}
end
local q = open(sub(KEYS[3], 1, -10))
if not q then
  return {-2, {ruined[sub(KEYS[3], 1, -10)]}, {}, -1}
end
local inbox, numbers, lengths = {}, {}, {[0] = soft('ZCARD', KEYS[4])}
for i = 5, #KEYS do
  inbox[i - 4], numbers[i - 4] = KEYS[i], byte(ARGV[4], i - 4)
  lengths[i - 4] = soft('LLEN', KEYS[i])
end
-- A write that a full memory refuses, before all others.
call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
local names = {set_aside = KEYS[3], returned = KEYS[4], sequence = KEYS[1]}
local budget = {messages = tonumber(ARGV[5]), bytes = tonumber(ARGV[6]), moved = 0}
local now = clock(ARGV[7]) / 1000
local left = new_sort()(q, names, inbox, numbers, lengths, tonumber(ARGV[3]), budget, now, ARGV[1])
if q.broken then
  q.notes[#q.notes + 1] = q.broken
end
if left == 0 or budget.moved == 0 then
  -- Nothing moves any more: what is left waits for an operator.
  left = 0
  call('DEL', KEYS[2])
end
save_all()
return {left, q.notes, q.aside, q.due and math.ceil(q.due - now) or -1}
