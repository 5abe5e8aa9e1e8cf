-- Change the weight or the cap of a key while its jobs wait.
--
-- KEYS[1] policy hash: order, single, key, weight, caps, weights
-- KEYS[2] values hash: 'k' .. key or '*' -> number
-- ARGV[1] what text: caps or weights
-- ARGV[2] field text: '!k' .. key, or '!*' for every key that has none of its own (caps), '' to look at the full keys only
-- ARGV[3] value number, '' = none
-- ARGV[4] cursor number: '0' to begin with; for '!*' and '', what the last call returned
-- Returns next cursor, '0' when done; -1 if the queue has no policy
-- Invariant: a key is in the index, or full, by the values that are in force
local q = open(sub(KEYS[1], 1, -7))
if not q then
  return '-1'
end
local what, field, value = ARGV[1], ARGV[2], ARGV[3]
if field == '' then
  q[what] = q[what] or call('EXISTS', KEYS[2]) == 1
elseif value == '' then
  call('HDEL', KEYS[2], field)
else
  call('HSET', KEYS[2], field, value)
end
local any = call('EXISTS', KEYS[2]) == 1
q[what] = any
call('HSET', KEYS[1], what, any and '1' or '0')
local cursor = '0'
if field == '' or field == '!*' then
  -- Keys that have more now leave on their own, when they are next.
  local found = call('SSCAN', q.base .. 'full', ARGV[4], 'COUNT', 64)
  cursor = found[1]
  for i = 1, #found[2] do
    unblock(q, sub(found[2][i], 3))
  end
else
  local key = sub(field, 3)
  if what == 'caps' then
    unblock(q, key)
  end
  for l = 0, 9 do
    local blocked = get(q, 'f') > 0 and call('SISMEMBER', q.base .. 'full', l .. ':' .. key) == 1
    local sequence, weight, front = nil, nil, nil
    if not blocked then
      sequence, weight, front = head_of(q, l, key)
    end
    if sequence then
      leave_index(q, l, key, front, sequence)
      if what == 'caps' and is_full(q, key) then
        call('SADD', q.base .. 'full', l .. ':' .. key)
        add(q, 'f', 1)
        add_ready(q, l, -count_of(q, l, key))
      else
        enter(q, l, key, front, sequence, weight)
      end
    end
  end
end
save_all()
return cursor
