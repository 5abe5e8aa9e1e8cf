-- Take up to n messages for n free slots, settling the tags that ride along.
--
-- KEYS[1] wake string: this worker's wake key, consumed here
-- KEYS[2] sequence string: counter of deliveries and places
-- KEYS[3] unacked hash: Kombu's records, tag -> [message, exchange, routing key]
-- KEYS[4] unacked_index zset: tag -> seconds
-- KEYS[5] holder hash: tag -> place 'list:number:deliveries:suffix', '' -> session
-- KEYS[6+] sources: per source set_aside stream, watchers zset, parked zset, returned zset, inbox lists
-- ARGV[1] worker id
-- ARGV[2] strategy number: 0 round_robin, 1 max_len, 2 min_len, 3 priority
-- ARGV[3] byte_limit bytes
-- ARGV[4] source_count number
-- ARGV[5] list_counts bytes: number of lists of each source
-- ARGV[6] levels bytes: levels of each source, 0 = none: each list is one
-- ARGV[7] lists bytes: index of each list, source by source
-- ARGV[8] sorted bytes: 1 for each source whose jobs are sorted by key
-- ARGV[9] single bytes: 1 for each source with a single active consumer
-- ARGV[10] lease_ttl milliseconds
-- ARGV[11+] sources: record suffix of each
-- ARGV[...] call: session, n, turn (0-based), idle (0/1), now (microseconds or ''), skip (bytes, 1 for each source to leave
--   alone, 2 to give up its lease too; '' = none), tags to settle
-- Returns {valid, turn, more, messages, bad, broken, lost, now, unsorted, notes, unknown, terms, soon, moved}: messages = source, tag,
--   list, deliveries, raw, ...; now in microseconds, '' if it was not asked for; unsorted = source, messages, ...; notes = source,
--   text, ...; unknown = sources that are to be sorted and have no policy; terms = source, term
--   of the lease (0 = it is ours, and its job in flight; below 0 = somebody else's, for so many milliseconds), ...
--   soon = milliseconds until the first message that went to the delayed is due, -1 = none did; moved = messages sorted
-- Invariant: the new place is written before the old one is removed; nothing is written for a stale session
local wake, sequence, unacked, unacked_index, holder = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, strategy, byte_limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local count, list_counts, levels, list_index, sorted = tonumber(ARGV[4]), ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local single, lease_ttl = ARGV[9], tonumber(ARGV[10])
local arg = 10 + count
local skip = ARGV[arg + 6]
local session, n, turn = ARGV[arg + 1], tonumber(ARGV[arg + 2]), tonumber(ARGV[arg + 3])
local idle = ARGV[arg + 4] == '1'
if call('HGET', holder, '') ~= session then
  return {0}
end
-- A key of a wrong type must stop the script here, not between its writes.
call('HLEN', unacked)
call('ZCARD', unacked_index)
local any_sorted, any_single = find(sorted, '\1', 1, true) ~= nil, find(single, '\1', 1, true) ~= nil
-- A refusal here, of a write that changes nothing, says that memory is full: then only what is needed gets sorted.
local roomy = not any_sorted or type(try('SETRANGE', wake, 0, '')) ~= 'table'
-- The first write is one that is not refused when memory is full, and later writes follow the first.
local woken = call('DEL', wake) == 1
local tags = {}
for i = arg + 7, #ARGV do
  tags[#tags + 1] = ARGV[i]
end
local root = sub(wake, 1, #wake - #worker - 5)
-- Before anything is chosen: what ended makes room for the next of its key.
local lost = settle(root, unacked, unacked_index, holder, tags)
local now = (any_sorted or any_single) and clock(ARGV[arg + 5])
-- Per source: keys before its own, lists before its own, messages waiting, messages taken. What is known of its
-- lists, `lengths` and `used` ([0] is the returned set), is only there where something waits, and what is known of
-- its returned set, only where something was returned.
local key_of, list_of, waiting, taken, lengths, used, returned = {}, {}, {}, {}, {}, {}, {}
local key, lists_before = 5, 0
for s = 1, count do
  key_of[s], list_of[s] = key, lists_before
  local lists = byte(list_counts, s)
  key, lists_before = key + 4 + lists, lists_before + lists
end
local plan, bad, broken, bytes, more = {}, {}, {}, 0, 0
local queues, unsorted, unknown, terms = {}, {}, {}, {}
local budget = {messages = 0, extra = 256, bytes = 262144}
local moved = 0

local function broke(s, failure)
  broken[#broken + 1], broken[#broken + 2] = s - 1, failure.err
end

local function level_of(s, list)
  local its_levels = byte(levels, s)
  return its_levels > 0 and math.min(list, its_levels - 1) or list
end

-- Sort what is new in a source, a little; returns how many of its messages may run, or may once they are sorted.
local function sort_some(s, q)
  local k, lists = key_of[s] + 4, byte(list_counts, s)
  local ready, length_of, new = q.ready, lengths[s], 0
  for i = 0, lists do
    new = new + (length_of[i] or 0)
  end
  if new == 0 then
    return ready
  end
  local needed = math.max(0, n - #plan - ready)
  -- A small inbox is sorted at once, so that the next choice is fair; a large one has the sorter, or gets one.
  local wanted = 0
  if roomy then
    wanted = new <= budget.extra and new or call('EXISTS', q.base .. 'sorter') == 0 and 16 or 0
  end
  budget.extra = budget.extra - math.min(budget.extra, math.max(0, wanted - needed))
  budget.messages = math.max(needed, wanted)
  local given = budget.messages
  if given == 0 then
    return ready + new
  end
  -- One message at least: the bytes bound what a call sorts beyond that.
  budget.bytes, budget.moved = math.max(budget.bytes, 1), 0
  local names = {set_aside = KEYS[k - 3], returned = KEYS[k], sequence = sequence}
  local inbox, numbers = {}, {}
  for i = 1, lists do
    inbox[i], numbers[i] = KEYS[k + i], byte(list_index, list_of[s] + i)
  end
  local left = new_sort()(q, names, inbox, numbers, length_of, byte(levels, s), budget, now / 1000, worker)
  moved = moved + budget.moved
  if left > 0 and budget.moved > 0 then
    unsorted[#unsorted + 1], unsorted[#unsorted + 2] = s - 1, left
  end
  return q.ready + left
end

-- Messages waiting in a source; read once a call and counted down, exact because the script is atomic.
local function measure(s)
  local total = waiting[s]
  if total then
    return total
  end
  local k, lists = key_of[s] + 4, byte(list_counts, s)
  local leave = byte(skip, s) or 0
  if byte(single, s) == 1 then
    local base = sub(KEYS[k - 3], 1, -10)
    if leave == 0 then
      local term = lead(root, base, worker, now / 1000, lease_ttl, unacked, unacked_index)
      terms[#terms + 1], terms[#terms + 2] = s - 1, int(term)
      leave = term > 0 and 0 or 1
    end
  end
  if leave > 0 then
    waiting[s] = 0
    return 0
  end
  local present = call('EXISTS', unpack(KEYS, k, k + lists))
  total = 0
  if present > 0 then
    local length_of = {}
    for j = 1, lists + 1 do
      if present == 0 then
        break
      end
      -- The returned set last: it is the one that is hardly ever there.
      local i = j % (lists + 1)
      local length = try(i == 0 and 'ZCARD' or 'LLEN', KEYS[k + i])
      if type(length) == 'table' then
        broke(s, length)
        present = present - 1
      elseif length > 0 then
        length_of[i], total, present = length, total + length, present - 1
      end
    end
    lengths[s], used[s], taken[s] = length_of, {}, 0
  end
  if byte(sorted, s) == 1 then
    local base = sub(KEYS[k - 3], 1, -10)
    local q = open(base)
    queues[s] = q
    if q then
      lengths[s], used[s], taken[s] = lengths[s] or {}, used[s] or {}, taken[s] or 0
      if q.ready == 0 and q.full > 0 then
        -- Nothing may run: a look whether some of the full keys are full by mistake.
        for _, entry in ipairs(call('SRANDMEMBER', base .. 'full', 4)) do
          moving().unblock(q, sub(entry, 3))
        end
      end
      total = sort_some(s, q)
    elseif ruined[base] then
      broke(s, {err = ruined[base]})
      total = 0
    else
      -- Its policy is gone: nothing is taken, lest it be in another order, until this worker knows what holds now.
      unknown[#unknown + 1] = s - 1
      total = 0
    end
  end
  waiting[s] = total
  return total
end

-- The returned message that goes before all that waits at `level`: the oldest of the highest level. A message has
-- the level that its list has now; the lists beyond the last level are one level, hence the look at several.
local function returned_head(s, level)
  local back = returned[s]
  if not back then
    back = {heads = {}, passed = {}, members = {}}
    returned[s] = back
  end
  local best, best_level
  for list = 0, 9 do
    local its_level = level_of(s, list)
    if its_level > (best_level or level) then
      break
    end
    local head = back.heads[list]
    if head == nil then
      local from, to = int(list * BAND), '(' .. int((list + 1) * BAND)
      local found = call('ZRANGEBYSCORE', KEYS[key_of[s] + 4], from, to, 'LIMIT', back.passed[list] or 0, 1)[1]
      head = false
      if found then
        local _, stop, place, deliveries = find(found, '^%d+:(%d+):(%d+):')
        if not stop then
          -- Nothing that we wrote: the returned messages of this source wait for an operator.
          broke(s, {err = 'a member of the returned set has no place'})
          lengths[s][0] = nil
          return nil
        end
        head = {list = list, place = tonumber(place), deliveries = tonumber(deliveries)}
        head.member, head.raw = found, sub(found, stop + 1)
      end
      back.heads[list] = head
    end
    if head and (not best or head.place < best.place) then
      best, best_level = head, its_level
    end
  end
  return best
end

-- Plan the next job of a source whose jobs are sorted; false if none may run now.
local function draw_by_key(s, q)
  for l = 0, 9 do
    if get(q, R[l]) > 0 then
      local c = pick(q, l, n)
      if c then
        local raw, number, deliveries, weight = draw_sorted(q, l, c)
        waiting[s], taken[s], bytes = waiting[s] - 1, taken[s] + 1, bytes + #raw
        waiting[s], q.fewer = math.max(0, waiting[s] - q.fewer), 0
        plan[#plan + 1] = {s, l, number, deliveries, raw, c.key, weight}
        return true
      end
    end
  end
  waiting[s] = 0
  return false
end

-- Move the oldest message of the highest level of a source to the plan; false if it yielded none.
local function draw(s)
  if queues[s] then
    return draw_by_key(s, queues[s])
  end
  local k, length_of, used_of, at = key_of[s] + 4, lengths[s], used[s], nil
  for i = 1, byte(list_counts, s) do
    if length_of[i] and (used_of[i] or 0) < length_of[i] then
      at = i
      break
    end
  end
  local list = at and byte(list_index, list_of[s] + at)
  local head = (used_of[0] or 0) < (length_of[0] or 0) and returned_head(s, at and level_of(s, list) or 9)
  local raw, place, deliveries = nil, false, 0
  if head then
    at, list, raw, place, deliveries = 0, head.list, head.raw, head.place, head.deliveries
  elseif at then
    raw = call('LINDEX', KEYS[k + at], -(used_of[at] or 0) - 1)
  end
  local reason = raw and problem(raw)
  if reason then
    local size = try('XLEN', KEYS[k - 3])
    if type(size) == 'table' then
      -- Nowhere to set it aside: it stays, and its source waits for an operator.
      broke(s, size)
      raw = nil
    end
  end
  if not raw then
    waiting[s] = 0
    return false
  end
  used_of[at] = (used_of[at] or 0) + 1
  if head then
    local back = returned[s]
    back.members[#back.members + 1] = head.member
    back.heads[list], back.passed[list] = nil, (back.passed[list] or 0) + 1
  end
  waiting[s] = waiting[s] - 1
  bytes = bytes + #raw
  if reason then
    bad[#bad + 1] = {s, list, reason, raw}
    return false
  end
  taken[s] = taken[s] + 1
  plan[#plan + 1] = {s, list, place, deliveries, raw}
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

if any_single then
  for s = 1, count do
    -- Whether or not a source before it has jobs.
    local base = sub(KEYS[key_of[s] + 1], 1, -10)
    if byte(single, s) == 1 and byte(skip, s) == 2 and not soft('HGET', base .. 'lease', 'tag') then
      give_up_lease(root, base, worker)
      terms[#terms + 1], terms[#terms + 2] = s - 1, '-1'
    end
  end
end
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
    if byte(single, s) == 1 then
      -- One job in flight.
      waiting[s] = 0
    end
  end
end

-- The new places, then the end of the old ones.
local messages, noted, notes = {}, {}, {}
for i = 1, #bad do
  local s, list, reason, raw = unpack(bad[i])
  local id = call('XADD', KEYS[key_of[s] + 1], '*', 'reason', reason, 'list', list, 'worker', worker, 'message', raw)
  local m = #noted
  noted[m + 1], noted[m + 2], noted[m + 3] = s - 1, id, reason
end
if #plan > 0 then
  local last = call('INCRBY', sequence, #plan)
  now = now or clock(ARGV[arg + 5])
  local seconds = format('%.6f', now / 1000000)
  local records, scores, places, counted, led = {}, {}, {}, {}, {}
  for i = 1, #plan do
    local s, list, place, deliveries, raw, its_key, weight = unpack(plan[i])
    local number = last - #plan + i
    -- A Redis that lost its last writes counts again from an earlier number, but in a later session.
    local tag = worker .. ':' .. session .. '.' .. int(number)
    local suffix = ARGV[10 + s]
    records[2 * i], scores[2 * i - 1] = '[' .. raw .. suffix, seconds
    places[2 * i] = format('%d:%.0f:%d:', list, place or number, deliveries)
    if its_key then
      if queues[s].single or queues[s].caps then
        -- Only what is counted has to be found again when it ends.
        tag = tag .. (byte(single, s) == 1 and 'b' or 'k')
        counted[#counted + 1] = {queues[s], 'running:' .. its_key, tag}
      elseif byte(single, s) == 1 then
        tag = tag .. 'l'
      end
      places[2 * i] = places[2 * i] .. weight .. ':' .. #its_key .. ':' .. its_key
    end
    if byte(single, s) == 1 then
      if not its_key then
        tag = tag .. 'l'
      end
      led[#led + 1], led[#led + 2] = sub(KEYS[key_of[s] + 1], 1, -10) .. 'lease', tag
    end
    places[2 * i] = places[2 * i] .. suffix
    records[2 * i - 1], scores[2 * i], places[2 * i - 1] = tag, tag, tag
    local m = #messages
    messages[m + 1], messages[m + 2], messages[m + 3] = s - 1, tag, list
    messages[m + 4], messages[m + 5] = deliveries, raw
  end
  -- The record last: an entry without one is cleared away, a record without one would lie there for ever.
  call('HSET', holder, unpack(places))
  call('ZADD', unacked_index, unpack(scores))
  call('HSET', unacked, unpack(records))
  -- After the holder, without which nobody would ever take these out again.
  for i = 1, #counted do
    local q, name, tag = unpack(counted[i])
    local _, failure = soft('SADD', q.base .. name, tag)
    odd(q, name, failure)
  end
  for i = 1, #led, 2 do
    call('HSET', led[i], 'tag', led[i + 1])
  end
end
for s, used_of in pairs(used) do
  local k = key_of[s] + 4
  for i, number in pairs(used_of) do
    if i > 0 then
      call('LTRIM', KEYS[k + i], 0, -number - 1)
    else
      call('ZREM', KEYS[k], unpack(returned[s].members))
    end
  end
end
for _, q in pairs(queues) do
  if q then
    commit(q)
    -- Where memory is full nobody sorts what is left.
    if #plan < n and (q.more or not roomy and unsorted[1]) then
      more = 1
    end
  end
end
-- Hand on: a source with backlog left wakes up to two parked workers; a worker that was woken
-- answers for every source; one that is full now leaves its watch to a parked one.
local full = #plan == n
for s = 1, count do
  if taken[s] or woken or idle and full then
    local left = ((taken[s] or 0) > 0 or woken) and measure(s) or 0
    local watchers, parked = KEYS[key_of[s] + 2], KEYS[key_of[s] + 3]
    if idle and (full or left > 0) then
      -- First, so that the wake goes to somebody else.
      try('ZREM', parked, wake)
    end
    local roused = left > 0 and wake_parked(parked, math.min(left, 2)) or 0
    if idle and full and try('ZREM', watchers, wake) == 1 and roused == 0 and call('EXISTS', watchers) == 0 then
      wake_parked(parked, 1)
    end
  end
end
save_all()
local soon
for s, q in pairs(queues) do
  soon = q and q.due and math.min(soon or q.due, q.due) or soon
  for i = 1, q and #q.aside or 0, 2 do
    local m = #noted
    noted[m + 1], noted[m + 2], noted[m + 3] = s - 1, q.aside[i], q.aside[i + 1]
  end
  for i = 1, q and #q.notes or 0 do
    notes[#notes + 1], notes[#notes + 2] = s - 1, q.notes[i]
  end
  if q and q.broken then
    broke(s, {err = q.broken})
  end
end
return {1, turn, more, messages, noted, broken, lost, now and int(now) or '', unsorted, notes, unknown, terms,
  soon and math.ceil(soon - now / 1000) or -1, moved}
