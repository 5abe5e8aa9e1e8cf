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
local M = moving()
local head_of, enter, unblock, block, leave_index = M.head_of, M.enter, M.unblock, M.block, M.leave_index
local q = open(sub(KEYS[1], 1, -7))
if not q then
  return ruined[sub(KEYS[1], 1, -7)] and redis.error_reply(ruined[sub(KEYS[1], 1, -7)]) or '-1'
end
local what, field, value = ARGV[1], ARGV[2], ARGV[3]
local key = sub(field, 3)
local every = field == '' or field == '!*'
if not every and call('HGET', KEYS[2], field) == (value ~= '' and value) then
  return '0'
end

-- The virtual time at which the next job of a key in the index became the next; nil if that means nothing.
local function start_of(l, front, sequence, weight)
  if q.order ~= 'fair' or front then
    return nil
  end
  local j, n, w = string.match(soft('HGET', q.base .. 'tags:' .. l, key) or '', '^(%S+) (%S+) (%S+)$')
  j, n, w = tonumber(j), tonumber(n), tonumber(w)
  local member, shift = member_of(front, sequence, key), 0
  local tag = soft('ZSCORE', q.base .. 'index:' .. l, member)
  if not tag and get(q, S[l]) > 0 then
    tag, shift = soft('ZSCORE', q.base .. 'old:' .. l, member), get(q, S[l])
  end
  tag = tonumber(tag or nil)
  if not tag then
    return nil
  elseif j and j + n / w == tag then
    return j + (n - 1) / w - shift
  end
  return tag - shift - 1 / weight_of(q, key, weight)
end

local heads = {}
if not every then
  for l = 0, 9 do
    if q.full == 0 or call('SISMEMBER', q.base .. 'full', l .. ':' .. key) == 0 then
      local sequence, weight, front = head_of(q, l, key)
      if sequence then
        heads[l] = {sequence, weight, front, start_of(l, front, sequence, weight)}
      end
    end
  end
end
if field ~= '' then
  if value == '' then
    call('HDEL', KEYS[2], field)
  else
    call('HSET', KEYS[2], field, value)
  end
end
local any = call('EXISTS', KEYS[2]) == 1
q[what] = any
call('HSET', KEYS[1], what, any and '1' or '0')
local cursor = '0'
if every then
  -- Keys that have more now leave on their own, when they are next.
  local found = call('SSCAN', q.base .. 'full', ARGV[4], 'COUNT', 64)
  cursor = found[1]
  for i = 1, #found[2] do
    unblock(q, sub(found[2][i], 3))
  end
elseif what == 'caps' then
  unblock(q, key)
end
for l, head in pairs(heads) do
  local sequence, weight, front, start = unpack(head, 1, 4)
  if what == 'weights' and (start or q.order == 'batch') then
    -- Its member stays the same: it is never out of the index.
    local tag = start and math.max(get(q, V[l]), start + 1 / weight_of(q, key, weight))
    if enter(q, l, key, front, sequence, weight, tag) then
      soft('HDEL', q.base .. 'tags:' .. l, key)
      if get(q, S[l]) > 0 then
        soft('ZREM', q.base .. 'old:' .. l, member_of(front, sequence, key))
      end
    end
  elseif what == 'caps' and is_full(q, key) then
    block(q, l, key)
    leave_index(q, l, key, front, sequence)
  end
end
save_all()
return cursor
