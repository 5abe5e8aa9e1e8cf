-- Take up to n messages for n free slots, settling the tags that ride along.
--
-- KEYS[1] wake string: this worker's wake key, consumed here
-- KEYS[2] sequence string: counter of deliveries and places
-- KEYS[3] unacked hash: Kombu's records, tag -> [message, exchange, routing key]
-- KEYS[4] unacked_index zset: tag -> seconds
-- KEYS[5] holder hash: tag -> place, '' -> session
-- KEYS[6+] sources: per source set_aside stream, watchers zset, parked zset, returned zset, inbox lists
-- ARGV[1] worker id
-- ARGV[2] strategy number: 0 round_robin, 1 max_len, 2 min_len, 3 priority
-- ARGV[3] byte_limit bytes
-- ARGV[4] source_count number
-- ARGV[5+] sources: per source record suffix, levels (0 = none), number of lists, index of each list
-- ARGV[...] call: session, n, turn (0-based), idle (0/1), now (microseconds or ''), tags to settle
-- Returns {valid, turn, more, messages, bad, broken, lost}: messages = source, tag, list, deliveries, raw, ...
-- Invariant: the new place is written before the old one is removed; nothing is written for a stale session
local wake, sequence, unacked, unacked_index, holder = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, strategy, byte_limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local count = tonumber(ARGV[4])
local sources, key, arg = {}, 5, 4
for s = 1, count do
  local lists = tonumber(ARGV[arg + 3])
  sources[s] = {key = key, arg = arg, lists = lists, taken = 0}
  key, arg = key + 4 + lists, arg + 3 + lists
end
local n, turn, idle = tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3]), ARGV[arg + 4] == '1'
if call('HGET', holder, '') ~= ARGV[arg + 1] then
  return {0}
end
local tags = {}
for i = arg + 6, #ARGV do
  tags[#tags + 1] = ARGV[i]
end
local plan, bad, broken, bytes = {}, {}, {}, 0

-- Messages waiting in a source; read once a call and counted down, exact because the script is atomic.
local function measure(s)
  local source = sources[s]
  if source.length then
    return source.length
  end
  local k, total, lengths, used = source.key, 0, {}, {}
  if call('EXISTS', unpack(KEYS, k + 4, k + 4 + source.lists)) > 0 then
    for i = 0, source.lists do
      local length = try(i == 0 and 'ZCARD' or 'LLEN', KEYS[k + 4 + i])
      if type(length) == 'table' then
        broken[#broken + 1], broken[#broken + 2], length = s - 1, length.err, 0
      end
      lengths[i], used[i], total = length, 0, total + length
    end
  end
  source.lengths, source.used, source.length = lengths, used, total
  return total
end

local function level_of(source, list)
  local levels = tonumber(ARGV[source.arg + 2])
  return levels > 0 and math.min(list, levels - 1) or list
end

-- Move the oldest message of the highest level of a source to the plan; false if it yielded none.
local function draw(s)
  local source = sources[s]
  local k, lengths, used = source.key, source.lengths, source.used
  local at
  for i = 1, source.lists do
    if used[i] < lengths[i] then
      at = i
      break
    end
  end
  local list = at and tonumber(ARGV[source.arg + 3 + at])
  local level = at and level_of(source, list)
  local raw, place, deliveries = nil, false, 0
  if used[0] < lengths[0] then
    local head = call('ZRANGE', KEYS[k + 4], used[0], used[0], 'WITHSCORES')
    local _, stop, l, p, d = find(head[1], '^(%d+):(%d+):(%d+):')
    local its_level = math.floor(tonumber(head[2]) / BAND)
    if not at or its_level <= level then
      used[0] = used[0] + 1
      raw, list, level = sub(head[1], stop + 1), tonumber(l), its_level
      place, deliveries = tonumber(p), tonumber(d)
    end
  end
  if not raw and at then
    used[at] = used[at] + 1
    raw = call('LINDEX', KEYS[k + 4 + at], -used[at])
  end
  if not raw then
    source.length = 0
    return false
  end
  source.length = source.length - 1
  bytes = bytes + #raw
  local reason = problem(raw)
  if reason then
    bad[#bad + 1] = {s, list, reason, raw}
    return false
  end
  source.taken = source.taken + 1
  plan[#plan + 1] = {s, list, level, place, deliveries, raw}
  return true
end

local function choose()
  local best, best_length
  for i = 0, count - 1 do
    local s = strategy == 0 and (turn + i) % count + 1 or i + 1
    local length = measure(s)
    if length > 0 then
      if strategy == 3 or strategy == 0 then
        return s
      elseif not best or (strategy == 1 and length > best_length) or (strategy == 2 and length < best_length) then
        best, best_length = s, length
      end
    end
  end
  return best
end

local more = 0
while #plan < n do
  if bytes >= byte_limit or #bad >= 64 then
    more = 1
    break
  end
  local s = choose()
  if not s then
    break
  end
  if draw(s) then
    turn = s % count
  end
end

-- Writes from here on. A DEL is not refused when memory is full, and later writes follow the first.
local woken = call('DEL', wake) == 1
local lost = settle(unacked, unacked_index, holder, tags)
local messages, noted = {}, {}
if #plan > 0 then
  local last = call('INCRBY', sequence, #plan)
  local seconds = format('%.6f', clock(ARGV[arg + 5]) / 1000000)
  local records, scores, places = {}, {}, {}
  for i = 1, #plan do
    local s, list, level, place, deliveries, raw = unpack(plan[i])
    local source, number = sources[s], last - #plan + i
    local tag = worker .. ':' .. int(number)
    local suffix = ARGV[source.arg + 1]
    records[2 * i - 1], records[2 * i] = tag, '[' .. raw .. suffix
    scores[2 * i - 1], scores[2 * i] = seconds, tag
    places[2 * i - 1] = tag
    places[2 * i] = format('%d:%d:%.0f:%d:', list, level, place or number, deliveries) .. suffix
    local m = #messages
    messages[m + 1], messages[m + 2], messages[m + 3] = s - 1, tag, list
    messages[m + 4], messages[m + 5] = deliveries, raw
  end
  call('HSET', unacked, unpack(records))
  call('ZADD', unacked_index, unpack(scores))
  call('HSET', holder, unpack(places))
end
for i = 1, #bad do
  local s, list, reason, raw = unpack(bad[i])
  local id = call('XADD', KEYS[sources[s].key + 1], '*', 'reason', reason, 'list', list, 'worker', worker, 'message', raw)
  local m = #noted
  noted[m + 1], noted[m + 2], noted[m + 3] = s - 1, id, reason
end
for s = 1, count do
  local source = sources[s]
  if source.used then
    for i = 1, source.lists do
      if source.used[i] and source.used[i] > 0 then
        call('LTRIM', KEYS[source.key + 4 + i], 0, -source.used[i] - 1)
      end
    end
    if source.used[0] and source.used[0] > 0 then
      call('ZREMRANGEBYRANK', KEYS[source.key + 4], 0, source.used[0] - 1)
    end
  end
end
-- Hand on: a source with backlog left wakes up to two parked workers; a worker that was woken
-- answers for every source; one that is full now leaves its watch to a parked one.
local full = #plan == n
for s = 1, count do
  local source = sources[s]
  local left = (source.taken > 0 or (woken and full)) and measure(s) or 0
  local parked = KEYS[source.key + 3]
  local roused = left > 0 and wake_parked(parked, math.min(left, 2)) or 0
  if idle and full then
    call('ZREM', parked, wake)
    if call('ZREM', KEYS[source.key + 2], wake) == 1 and roused == 0
        and call('EXISTS', KEYS[source.key + 2]) == 0 then
      wake_parked(parked, 1)
    end
  end
end
return {1, turn, more, messages, noted, broken, lost}
