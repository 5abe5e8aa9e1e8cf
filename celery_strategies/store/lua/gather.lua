-- Take sorted jobs out of their order, some at a time, for unsort.lua to give back to Kombu's lists.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] policy hash: removed once nothing is sorted
-- KEYS[3] unsorted list: where they go, the first to run at the right
-- ARGV[1] count number of jobs at most
-- Returns number of jobs moved, -1 when nothing is sorted any more
-- Invariant: the list has a job before its key's list loses it; caps and groups hold nothing back
call('DEL', KEYS[1])
local q = open(sub(KEYS[2], 1, -7))
if not q then
  return -1
end
q.caps, q.single = false, false
if get(q, 'f') > 0 then
  for _, entry in ipairs(call('SRANDMEMBER', q.base .. 'full', 64)) do
    unblock(q, sub(entry, 3))
  end
  -- Whatever has no jobs any more.
  if call('SCARD', q.base .. 'full') == 0 then
    put(q, 'f', 0)
  end
  save_all()
end
local moved, bytes, count = 0, 0, tonumber(ARGV[1])
for l = 0, 9 do
  while moved < count and bytes < 262144 and get(q, R[l]) > 0 do
    local before = moved
    while moved < count and bytes < 262144 do
      local c = pick(q, l, 64)
      if not c then
        break
      end
      local raw = draw_sorted(q, l, c)
      call('LPUSH', KEYS[3], l .. ':' .. raw)
      moved, bytes = moved + 1, bytes + #raw
    end
    commit(q)
    if moved == before then
      break
    end
  end
end
if moved == 0 and get(q, 'f') == 0 then
  for l = 0, 9 do
    -- Whoever removed a key's jobs by hand did not lower the counters.
    if get(q, R[l]) > 0 and call('EXISTS', q.base .. 'index:' .. l, q.base .. 'old:' .. l) == 0 then
      add_ready(q, l, -get(q, R[l]))
    end
  end
end
save_all()
if moved == 0 and get(q, 'f') == 0 and q.ready == 0 then
  call('DEL', KEYS[2], q.base .. 'state', q.base .. 'ready', q.base .. 'sorter')
  return -1
end
return moved
