-- Take sorted jobs out of their order, some at a time, for unsort.lua to give back to Kombu's lists.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] policy hash: removed once nothing is sorted
-- KEYS[3] unsorted list: where they go, the first to run at the right
-- ARGV[1] count number of jobs at most
-- ARGV[2+] strays: 'level:key' of lists that exist: nothing is moved, they come into the index if they are not there
-- Returns number of jobs moved, -1 when nothing is sorted any more
-- Invariant: the list has a job before its key's list loses it; caps and groups hold nothing back
local M = moving()
local head_of, is_indexed, count_of, enter, unblock = M.head_of, M.is_indexed, M.count_of, M.enter, M.unblock
call('DEL', KEYS[1])
local base = sub(KEYS[2], 1, -7)
if #ARGV > 1 and not open(base) and not ruined[base] then
  -- Somebody removed the policy. By which order it was sorted is not known; this one keeps the order of the index.
  call('HSET', KEYS[2], 'order', 'fair')
  opened[base] = nil
end
local q = open(base)
if not q then
  return ruined[base] and redis.error_reply(ruined[base]) or -1
end
q.caps, q.single = false, false
if #ARGV > 1 then
  put(q, 'b', math.max(get(q, 'b'), MANY))
  for i = 2, #ARGV do
    local l, key = tonumber(sub(ARGV[i], 1, 1)), sub(ARGV[i], 3)
    local sequence, weight, front = head_of(q, l, key)
    local blocked = q.full > 0 and call('SISMEMBER', base .. 'full', ARGV[i]) == 1
    if sequence and not blocked and not is_indexed(q, l, key, front, sequence) then
      add_ready(q, l, count_of(q, l, key))
      save(q)
      enter(q, l, key, front, sequence, weight)
    end
  end
  save_all()
  return 0
end
local blocked = q.full
if blocked > 0 then
  for _, entry in ipairs(call('SRANDMEMBER', base .. 'full', 64)) do
    unblock(q, sub(entry, 3))
  end
end
local moved, dropped, bytes, count, unreadable = 0, 0, 0, tonumber(ARGV[1]), false

local function move(l, raw)
  call('LPUSH', KEYS[3], l .. ':' .. raw)
  moved, bytes = moved + 1, bytes + #raw
end

for l = 0, 9 do
  while moved < count and bytes < 262144 do
    local before = moved + dropped
    local found = candidates(q, l, 64)
    unreadable = unreadable or not found.readable
    while moved < count and bytes < 262144 do
      local c = pick(q, l, 64)
      if not c then
        break
      end
      move(l, (draw_sorted(q, l, c)))
    end
    for i = 1, #found do
      local c = found[i]
      if c.skipped then
        -- Its next element is none of ours: whoever reads the list sets it aside.
        move(l, c.element)
        c.fronts[#c.fronts + 1], c.used = c.front and c.element or nil, c.used + (c.front and 0 or 1)
        c.taken = c.taken + 1
      elseif c.gone and c.taken == 0 then
        dropped = dropped + 1
      end
    end
    commit(q)
    if moved + dropped == before then
      break
    end
  end
end
save_all()
if moved + dropped == 0 and (unreadable or q.full > 0 and q.full == blocked) then
  return redis.error_reply(q.broken or 'keys that are full cannot be read')
elseif moved + dropped + q.full == 0 then
  local names = {base .. 'state', base .. 'ready', base .. 'sorter'}
  for l = 0, 9 do
    names[#names + 1] = base .. 'tags:' .. l
  end
  call('DEL', KEYS[2], unpack(names))
  return -1
end
return moved
