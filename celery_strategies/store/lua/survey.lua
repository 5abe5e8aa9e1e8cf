-- Look at some of the keys of a queue's sorted jobs.
--
-- KEYS[1] policy hash: how the queue is sorted
-- ARGV[1] what text: 'index:<level>', 'old:<level>', or 'full'
-- ARGV[2] from number: rank of the first key; of the full ones, a cursor
-- ARGV[3] count number of keys
-- ARGV[4] bytes number: of messages that are read for their weights
-- Returns {next (rank or cursor, -1 = that was all), key, level, finish tag, jobs, given back, in flight, weight, cap, ...}: weight is
--   '' if it was not read; cap is '' where there is none
-- Invariant: reads only
local base, what, from, count = sub(KEYS[1], 1, -7), ARGV[1], ARGV[2], tonumber(ARGV[3])
local budget = tonumber(ARGV[4])
local policy = soft('HMGET', KEYS[1], 'order', 'single', 'caps', 'weights') or {}
local single, caps, weights = policy[2] == '1', policy[3] == '1', policy[4] == '1'
local weighed = policy[1] == 'fair' or policy[1] == 'batch'
local back = tonumber(soft('HGET', base .. 'state', 'b') or 0) or 0
local answer = {-1}

-- The weight of a key's next job.
local function weight_of(level, key)
  local over = weights and soft('HGET', base .. 'weights', '!k' .. key)
  if over or not weighed then
    return over or '1'
  elseif budget <= 0 then
    return ''
  end
  local name = level .. ':' .. key
  local head = back > 0 and (soft('ZRANGE', base .. 'front:' .. name, 0, 0) or {})[1]
    or soft('LINDEX', base .. 'jobs:' .. name, -1)
  budget = budget - (head and #head or 0)
  local own = string.match(head or '', '^%d+:%d+:([^:]*):')
  return own and (own == '' and '1' or own) or ''
end

local function cap_of(key)
  if key == '' then
    return ''
  elseif single then
    return '1'
  end
  local found = caps and soft('HMGET', base .. 'caps', '!k' .. key, 'k' .. key, '!*', '*') or {}
  return found[1] or found[2] or found[3] or found[4] or ''
end

local function add(level, key, tag)
  local name, m = level .. ':' .. key, #answer
  answer[m + 1], answer[m + 2], answer[m + 3] = key, level, tag
  answer[m + 4] = soft('LLEN', base .. 'jobs:' .. name) or 0
  answer[m + 5] = back > 0 and soft('ZCARD', base .. 'front:' .. name) or 0
  answer[m + 6] = (single or caps) and soft('SCARD', base .. 'running:' .. key) or 0
  answer[m + 7], answer[m + 8] = weight_of(level, key), cap_of(key)
end

if what == 'full' then
  local found = soft('SSCAN', base .. 'full', from, 'COUNT', count) or {'0', {}}
  answer[1] = found[1] == '0' and -1 or found[1]
  for _, entry in ipairs(found[2]) do
    add(sub(entry, 1, 1), sub(entry, 3), '')
  end
else
  local first = tonumber(from)
  local found = soft('ZRANGE', base .. what, first, first + count - 1, 'WITHSCORES') or {}
  answer[1] = #found == 2 * count and first + count or -1
  for i = 1, #found, 2 do
    add(sub(what, -1), sub(found[i], 18), found[i + 1])
  end
end
return answer
