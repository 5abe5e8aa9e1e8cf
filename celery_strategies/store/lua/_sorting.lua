-- Sorting a queue's new jobs by key, and drawing the next ones. Defines locals only; needs _sorted.
-- Returns `sort`. Redis runs all of a script's definitions in each call; those of sorting are hardly ever needed.
local function new_sort()
  local M = moving()
  local put_front, head_of, is_indexed, enter = M.put_front, M.head_of, M.is_indexed, M.enter
  -- Messages read from a list at once while sorting: a few, since nobody knows how large they are.
  local CHUNK = 8

  -- Milliseconds since the epoch that an ISO 8601 time with an offset means, never too early; nil for any other text.
  local function milliseconds(text)
    local year, month, day, hour, minute, second, rest = string.match(
      text, '^(%d%d%d%d)%-(%d%d)%-(%d%d)[T ](%d%d):(%d%d):(%d%d)(.*)$')
    if not year then
      return nil
    end
    local fraction, zone = string.match(rest, '^%.(%d+)(.*)$')
    zone = zone or rest
    local sign, zone_hour, zone_minute = string.match(zone, '^([+-])(%d%d):?(%d%d)$')
    local offset = 0
    if sign then
      zone_hour, zone_minute = tonumber(zone_hour), tonumber(zone_minute)
      if zone_hour > 23 or zone_minute > 59 then
        return nil
      end
      offset = (zone_hour * 60 + zone_minute) * (sign == '+' and 60 or -60)
    elseif zone ~= 'Z' then
      return nil
    end
    local last_days = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}
    year, month, day = tonumber(year), tonumber(month), tonumber(day)
    hour, minute, second = tonumber(hour), tonumber(minute), tonumber(second)
    local leap = year % 4 == 0 and (year % 100 ~= 0 or year % 400 == 0)
    local last = month == 2 and leap and 29 or last_days[month]
    if not last or day < 1 or day > last or year < 1 or hour > 23 or minute > 59 or second > 59 then
      return nil
    end
    local past = year - 1
    local days = past * 365 + math.floor(past / 4) - math.floor(past / 100) + math.floor(past / 400) + day - 1 - 719162
    for earlier = 1, month - 1 do
      days = days + (earlier == 2 and leap and 29 or last_days[earlier])
    end
    local seconds = days * 86400 + hour * 3600 + minute * 60 + second - offset
    if not fraction then
      return seconds * 1000
    end
    local beyond = find(fraction, '[1-9]', 4) and 1 or 0
    return seconds * 1000 + tonumber(sub(fraction .. '00', 1, 3)) + beyond
  end

  -- The key ('' = none) and the weight ('' = 1) in a message's headers, and what was wrong with them, if anything was.
  local function tag_of(q, message)
    local key, weight, wrong = message.headers[q.key_header], nil, nil
    if key == nil or key == cjson.null then
      key = ''
    elseif type(key) == 'number' and key == math.floor(key) and math.abs(key) < 1e15 then
      -- Zero has a sign in JSON.
      key = int(key + 0)
    elseif type(key) ~= 'string' or key == '' or #key > 512 or find(key, '\0', 1, true) then
      -- A larger integer has lost digits in cjson, which makes two tenants one.
      wrong = q.key_header .. ' is no key: ' .. (type(key) == 'string' and sub(key, 1, 40) or type(key))
      key = ''
    end
    if q.weight_header ~= '' then
      weight = message.headers[q.weight_header]
    end
    if weight == nil or weight == cjson.null then
      return key, '', wrong
    end
    if type(weight) ~= 'number' or weight ~= weight or weight <= 0 then
      return key, '', wrong or q.weight_header .. ' is no weight: ' .. sub(tostring(weight), 1, 40)
    elseif weight < 1e-6 or weight > 1e6 then
      wrong = wrong or q.weight_header .. ' is outside 1e-6 to 1e6: ' .. tostring(weight)
      weight = math.max(1e-6, math.min(1e6, weight))
    end
    return key, weight == 1 and '' or format('%.17g', weight), wrong
  end

  local function note(q, text)
    if text and #q.notes < 8 then
      q.notes[#q.notes + 1] = text
    end
  end

  -- Set a message aside that nobody can run; false if that is impossible, which leaves it where it is.
  local function put_aside(q, names, worker, list, reason, raw)
    local id, failure = soft('XADD', names.set_aside, '*', 'reason', reason, 'list', list, 'worker', worker, 'message', raw)
    if not id then
      odd(q, 'set_aside', failure)
      return false
    end
    local m = #q.aside
    q.aside[m + 1], q.aside[m + 2] = id, reason
    return true
  end

  -- Whether the keys that a new job of a level goes to have the types they should have.
  local function sound(q, l)
    if q.sound[l] == nil then
      local _, index = soft('ZCARD', q.base .. 'index:' .. l)
      local _, delayed = soft('ZCARD', q.base .. 'delayed')
      odd(q, 'index:' .. l, index)
      odd(q, 'delayed', delayed)
      q.sound[l] = not index and not delayed
    end
    return q.sound[l]
  end

  -- What new jobs of one key on one level come to, made at the first of them.
  local function group_of(q, jobs, l, key)
    local name = l .. ':' .. key
    local group = jobs.groups[name]
    if not group then
      group = {l = l, key = key, elements = {}}
      jobs.groups[name], jobs.order[#jobs.order + 1] = group, group
      group.length, group.failure = soft('LLEN', jobs_key(q, l, key))
      if group.length and (get(q, 'b') > 0 or q.single) then
        group.fronts, group.failure = soft('ZCARD', front_key(q, l, key))
      end
      odd(q, 'the jobs of ' .. key, group.failure)
    end
    return group
  end

  -- Put a new job where it belongs: with the group of its key in `jobs`, or among those that are not due yet. False if it
  -- must stay where it is.
  local function classify(q, names, jobs, raw, list, l, now, worker)
    local reason, message = problem(raw)
    if reason then
      return put_aside(q, names, worker, list, reason, raw)
    end
    jobs.sequence = jobs.sequence + 1
    local eta = message.headers.eta
    local due = type(eta) == 'string' and milliseconds(eta)
    if due and due > now then
      call('ZADD', q.base .. 'delayed', int(due), format('%016.0f:%d:', jobs.sequence, list) .. raw)
      q.due = math.min(q.due or due, due)
      return true
    end
    local key, weight, wrong = tag_of(q, message)
    note(q, wrong)
    local group = group_of(q, jobs, l, key)
    if group.failure then
      return put_aside(q, names, worker, list, 'the jobs of its key cannot be read', raw)
    end
    local element = format('%.0f:0:%s:', jobs.sequence, weight) .. raw
    local retries = q.single and key ~= '' and tonumber(message.headers.retries)
    if retries and retries > 0 then
      -- A retry goes before what its group has waiting, or their order would be lost.
      group.again = group.again or {}
      group.again[#group.again + 1] = {jobs.sequence, element}
    else
      group.elements[#group.elements + 1] = element
      group.first, group.weight = group.first or jobs.sequence, group.weight or weight
    end
    return true
  end

  -- Add the sorted jobs of all keys, oldest first.
  local function append(q, jobs)
    for i = 1, #jobs.order do
      local group = jobs.order[i]
      local l, key, number = group.l, group.key, #group.elements
      for j = 1, #(group.again or {}) do
        put_front(q, l, key, group.again[j][1], group.again[j][2])
        group.fronts = (group.fronts or 0) + 1
      end
      if number > 0 then
        local active = group.length > 0 or (group.fronts or 0) > 0
        group.blocked = active and q.full > 0 and call('SISMEMBER', q.base .. 'full', l .. ':' .. key) == 1
        group.full = not active and is_full(q, key)
        group.enters = not active and not group.full
        if active and not group.blocked then
          local head, weight, front = head_of(q, l, key)
          if head and not is_indexed(q, l, key, front, head) then
            -- Its index was removed or evicted.
            add_ready(q, l, group.length + (group.fronts or 0))
            group.enters, group.first, group.weight, group.front = true, head, weight, front
          end
        end
        add(q, 't', number)
        if not group.blocked and not group.full then
          add_ready(q, l, number)
        end
      end
    end
    save(q)
    for i = 1, #jobs.order do
      local group = jobs.order[i]
      local l, key = group.l, group.key
      if group.full then
        if call('SADD', q.base .. 'full', l .. ':' .. key) == 1 then
          q.full = q.full + 1
        end
      elseif group.enters then
        enter(q, l, key, group.front, group.first, group.weight)
      end
      if #group.elements > 0 then
        call('LPUSH', jobs_key(q, l, key), unpack(group.elements))
      end
    end
  end

  -- How many messages to read at once: as many as there are bytes for, going by the largest so far; one to begin with.
  local function room(budget)
    return budget.largest and math.max(1, math.min(CHUNK, budget.messages, math.floor(budget.bytes / budget.largest))) or 1
  end

  -- Note that a message was sorted.
  local function spend(budget, raw)
    budget.messages, budget.bytes = budget.messages - 1, budget.bytes - #raw
    budget.largest = math.max(budget.largest or 1, #raw)
    budget.moved = (budget.moved or 0) + 1
  end

  -- Sort what was given back while the queue had no policy; returns how many are left.
  local function sort_returned(q, names, number, level, budget, worker)
    while number > 0 and budget.messages > 0 and budget.bytes > 0 do
      local members = call('ZRANGE', names.returned, 0, math.min(room(budget), number) - 1)
      if #members == 0 then
        return 0
      end
      for i = 1, #members do
        local _, stop, list, place, deliveries = find(members[i], '^(%d+):(%d+):(%d+):')
        local raw = stop and sub(members[i], stop + 1) or members[i]
        local reason, message = 'a member of the returned set has no place', nil
        if stop then
          reason, message = problem(raw)
        end
        local moved
        if reason then
          moved = put_aside(q, names, worker, list or 0, reason, raw)
        else
          local l, key, weight, wrong = level(tonumber(list)), tag_of(q, message)
          note(q, wrong)
          moved = put_front(q, l, key, tonumber(place), format('%s:%s:%s:', place, deliveries, weight) .. raw)
        end
        if not moved then
          return number
        end
        call('ZREM', names.returned, members[i])
        number = number - 1
        spend(budget, members[i])
      end
    end
    return number
  end

  -- Elements from the tail of a list of `length` elements, the last `done` left out, the oldest last. Redis 6.2 walks to where
  -- an LRANGE begins from the head, which takes milliseconds where a million waits; LINDEX it walks from the nearer end.
  local function last_of(name, length, done, count)
    if length < 1000 then
      return call('LRANGE', name, -done - count, -done - 1)
    end
    local found = {}
    for i = count, 1, -1 do
      found[#found + 1] = call('LINDEX', name, -done - i)
    end
    return found
  end

  -- Sort up to `budget.messages` messages or `budget.bytes` bytes of a queue's inbox, and what others gave back unsorted.
  -- `inbox` names the lists, `numbers` their list numbers, `lengths` their lengths, which it lowers. Every message is in its
  -- new place before it leaves the old one. Returns the number of messages left; `budget.moved` says how many went.
  local function sort(q, names, inbox, numbers, lengths, levels, budget, now, worker)
    local trims, left, reserve = {}, 0, 0
    local function level(list)
      return levels > 0 and math.min(list, levels - 1) or list
    end
    for i = 1, #inbox do
      reserve = reserve + (lengths[i] or 0)
    end
    reserve = math.min(reserve, budget.messages)
    -- The first write: numbers for all that may be sorted.
    local last = reserve > 0 and call('INCRBY', names.sequence, reserve) or 0
    local jobs = {groups = {}, order = {}, sequence = last - reserve}
    if lengths[0] and lengths[0] > 0 then
      lengths[0] = sort_returned(q, names, lengths[0], level, budget, worker)
    end
    left = lengths[0] or 0
    for i = 1, #inbox do
      local length, done, l = lengths[i] or 0, 0, level(numbers[i])
      local go_on = length > 0 and sound(q, l)
      while go_on and done < length and budget.messages > 0 and budget.bytes > 0 do
        local chunk = math.min(room(budget), length - done)
        local found = last_of(inbox[i], length, done, chunk)
        go_on = #found == chunk
        for j = #found, 1, -1 do
          if budget.bytes <= 0 then
            break
          end
          if not classify(q, names, jobs, found[j], numbers[i], l, now, worker) then
            go_on = false
            break
          end
          done = done + 1
          spend(budget, found[j])
        end
      end
      trims[i], lengths[i] = done, length - done
      left = left + lengths[i]
    end
    append(q, jobs)
    for i, done in pairs(trims) do
      if done > 0 then
        call('LTRIM', inbox[i], 0, -done - 1)
      end
    end
    return left
  end

  return sort
end

-- During a rebase: the best of the old index move to the new one.
local function move_old(q, l, index)
  local old, shift = q.base .. 'old:' .. l, get(q, S[l])
  local best, failure = soft('ZRANGE', old, 0, 63, 'WITHSCORES')
  odd(q, 'old:' .. l, failure)
  best = best or {}
  for i = 1, #best, 2 do
    local key = sub(best[i], 18)
    call('ZADD', index, format('%.17g', tonumber(best[i + 1]) - shift), best[i])
    local j, rest = string.match(soft('HGET', q.base .. 'tags:' .. l, key) or '', '^(%S+)( .*)$')
    if j then
      call('HSET', q.base .. 'tags:' .. l, key, format('%.17g', tonumber(j) - shift) .. rest)
    end
  end
  if #best > 0 then
    call('ZREMRANGEBYRANK', old, 0, #best / 2 - 1)
  end
  if #best < 128 then
    put(q, S[l], 0)
  end
end

-- Look at the next `count` keys of a level's index.
local function look_on(q, l, found, count)
  local entries, failure = soft('ZRANGE', found.index, found.read, found.read + count - 1, 'WITHSCORES')
  odd(q, 'index:' .. l, failure)
  entries = entries or {}
  for i = 1, #entries, 2 do
    local member = entries[i]
    local c = {
      member = member, old = member, tag = tonumber(entries[i + 1]), key = sub(member, 18), used = 0, fronts = {}, rank = 0,
      taken = 0,
    }
    -- A script that was stopped may have left two entries of a key. The first decides which is right.
    c.gone = found.keys[c.key]
    c.exact = c.gone
    found.keys[c.key] = true
    found[#found + 1] = c
  end
  found.read = found.read + #entries / 2
  return failure == nil
end

-- The keys of a level that may run, at least the n best of them, in no order.
local function candidates(q, l, n)
  local found = q.levels[l]
  if not found then
    found = {index = q.base .. 'index:' .. l, read = 0, keys = {}, spare = 64}
    q.levels[l] = found
    if get(q, S[l]) > 0 and soft('ZCARD', found.index) then
      move_old(q, l, found.index)
    end
    found.readable = look_on(q, l, found, n)
  end
  return found
end

-- Read a candidate's next job: the first of what was given back, else of its list. Its parts are nil if there is none, or if
-- it is none of ours.
local function read_next(q, l, c)
  local asks = c.front ~= false and get(q, 'b') > 0
  c.element, c.sequence, c.front = nil, nil, false
  if asks then
    local first, failure = soft('ZRANGE', front_key(q, l, c.key), #c.fronts, #c.fronts)
    odd(q, 'front:' .. l .. ':' .. c.key, failure)
    c.element = first and first[1]
    c.front = c.element ~= nil
  end
  if not c.element then
    -- Not LRANGE: see last_of.
    local last, failure = soft('LINDEX', jobs_key(q, l, c.key), -c.used - 1)
    c.element = last or nil
    odd(q, 'jobs:' .. l .. ':' .. c.key, failure)
  end
  if c.element then
    c.sequence, c.deliveries, c.own, c.stop = parse(c.element)
    if not c.sequence then
      odd(q, 'jobs:' .. l .. ':' .. c.key, 'an element is none of ours')
    end
  end
  return c.sequence ~= nil
end

-- Note that the jobs of a key cannot run any more: `q.fewer` counts those that this call found to be so.
local function stop(q, key)
  if q.stopped[key] then
    return
  end
  q.stopped[key] = true
  for l = 0, 9 do
    if get(q, R[l]) > 0 then
      q.fewer = q.fewer + moving().count_of(q, l, key)
      for _, c in ipairs(q.levels[l] or {}) do
        if c.key == key then
          q.fewer = q.fewer - c.taken
        end
      end
    end
  end
end

-- Whether sums of 1/weight are exact: it is a power of two.
local function exact(weight)
  return math.frexp(weight) == 0.5
end

-- Move on to a candidate's next job, as celery_strategies.core.interleave describes; it leaves if it has none or is full.
local function advance(q, l, c, weight)
  local was_front, key, v = c.front, c.key, V[l]
  c.exact = exact(weight)
  q.in_flight[key] = q.in_flight[key] and q.in_flight[key] + 1
  if q.order == 'fair' then
    put(q, v, math.max(get(q, v), c.tag))
  end
  if is_full(q, key) then
    stop(q, key)
    c.gone = true
    return
  end
  if not read_next(q, l, c) then
    -- What is none of ours stays in the way; its place in the index tells.
    c.gone = c.element == nil
    c.skipped = not c.gone
    if c.gone then
      return
    end
    c.sequence, c.own = 0, ''
  end
  c.member = member_of(c.front, c.sequence, key)
  local next_weight = weight_of(q, key, c.own)
  c.weight = next_weight
  if q.order == 'age' or q.order == 'turn' then
    c.tag = entering(q, l, c.front, c.sequence, next_weight)
  elseif q.order == 'batch' then
    c.rank = c.rank + 1
    c.tag, c.entry = (c.rank + 1) / next_weight, 1 / next_weight
  elseif c.front then
    c.tag, c.n = get(q, v), nil
  elseif was_front then
    c.tag, c.n = get(q, v) + 1 / next_weight, nil
  elseif c.exact then
    -- As good as counting from where the weight began, and nothing need be remembered.
    c.tag = c.tag + 1 / next_weight
  else
    if not c.known then
      local told = soft('HGET', q.base .. 'tags:' .. l, key) or ''
      local j, n, w = string.match(told, '^(%S+) (%S+) (%S+)$')
      c.known, c.stored, c.j, c.n, c.w = true, j ~= nil, tonumber(j), tonumber(n), tonumber(w)
      if c.n and c.j + c.n / c.w ~= c.tag then
        -- Left by a script that was stopped.
        c.n = nil
      end
    end
    if c.n and c.w == next_weight then
      c.n = c.n + 1
      c.tag = c.j + c.n / next_weight
    elseif not c.n and weight == next_weight then
      c.j, c.n, c.w = c.tag - 1 / weight, 2, weight
      c.tag = c.j + 2 / weight
    else
      c.n = nil
      c.tag = c.tag + 1 / next_weight
    end
  end
end

-- Whether a candidate can be taken. If not, it is `gone` from the index, or `skipped`: somebody has to look at its keys.
local function usable(q, l, c)
  if not c.element then
    if not read_next(q, l, c) then
      c.gone = c.element == nil
      c.skipped = not c.gone
      return false
    end
    local member = member_of(c.front, c.sequence, c.key)
    if member ~= c.member then
      local found = q.levels[l]
      if soft('ZSCORE', found.index, member) then
        -- The other entry is right, whether it was looked at or comes.
        found.keys[c.key] = nil
        for i = 1, #found do
          if found[i].old == member then
            found[i].gone, found[i].exact, found.keys[c.key] = nil, nil, true
          end
        end
        c.gone, c.exact = true, true
        return false
      end
      c.member = member
    end
  end
  if is_full(q, c.key) then
    -- Its cap was lowered, or it had jobs on another level.
    stop(q, c.key)
    c.full, c.gone = true, true
    return false
  end
  c.skipped = q.uncounted[c.key] ~= nil
  return not c.skipped
end

-- Choose the next job of a level; nil if nothing may run. Writes nothing.
local function pick(q, l, n)
  local found = candidates(q, l, n)
  while true do
    local best
    for i = 1, #found do
      local c = found[i]
      if not c.gone and not c.skipped
          and (not best or c.tag < best.tag or (c.tag == best.tag and c.member < best.member)) then
        best = c
      end
    end
    if not best then
      if #found == 0 and found.readable and get(q, S[l]) == 0 then
        -- Whoever removed a key's jobs by hand did not lower the counter.
        add_ready(q, l, -get(q, R[l]))
        put(q, V[l], 0)
      end
      return nil
    elseif usable(q, l, best) then
      return best
    elseif found.spare > 0 then
      found.spare = found.spare - 1
      look_on(q, l, found, 1)
    else
      -- There may be others behind those that are gone.
      q.more = q.more or best.gone
    end
  end
end

-- Plan that a candidate's next job is taken. Returns message, sequence, deliveries and weight of it.
local function draw_sorted(q, l, c)
  local raw, sequence, deliveries, own = sub(c.element, c.stop + 1), c.sequence, c.deliveries, c.own
  local weight = c.weight or weight_of(q, c.key, own)
  if c.front then
    c.fronts[#c.fronts + 1] = c.element
  else
    c.used = c.used + 1
  end
  c.taken = c.taken + 1
  advance(q, l, c, weight)
  return raw, sequence, deliveries, own
end

-- Take what was drawn out of the lists and fronts of a level; the jobs have their new places already.
local function remove_drawn(q, l, found)
  for i = 1, #found do
    local c = found[i]
    if #c.fronts > 0 then
      call('ZREM', front_key(q, l, c.key), unpack(c.fronts))
      add(q, 'b', -#c.fronts)
    end
    if c.used > 0 then
      call('LTRIM', jobs_key(q, l, c.key), 0, -c.used - 1)
    end
    if c.taken > 0 then
      add(q, 't', -c.taken)
      add_ready(q, l, -c.taken)
    end
  end
end

-- A key that is full now leaves the index on every level where it has jobs.
local function block_everywhere(q, key)
  for l = 0, 9 do
    if get(q, R[l]) > 0 then
      local sequence, _, front = moving().head_of(q, l, key)
      if sequence then
        moving().block(q, l, key)
        moving().leave_index(q, l, key, front, sequence)
      end
    end
  end
end

-- Have a level count from zero again: its index becomes the old one. `open` knows what to do if this is stopped.
local function rebase(q, l, v)
  local state = q.base .. 'state'
  call('HSET', state, S[l], format('%.17g', -v))
  call('RENAME', q.base .. 'index:' .. l, q.base .. 'old:' .. l)
  call('HSET', state, S[l], format('%.17g', v), V[l], '0')
  q.state[S[l]] = v
  put(q, V[l], 0)
end

-- Give the keys of a level that were drawn from their new places in the index, or none.
local function reindex(q, l, found)
  local index, tags = found.index, q.base .. 'tags:' .. l
  local gone, entries, kept, forgotten, entered, served = {}, {}, {}, {}, {}, false
  for i = 1, #found do
    local c = found[i]
    if c.taken > 0 or c.gone then
      served = served or c.taken > 0
      if not c.gone then
        entered[c.member] = true
        entries[#entries + 1], entries[#entries + 2] = format('%.17g', c.entry or c.tag), c.member
        if c.n then
          kept[#kept + 1], kept[#kept + 2] = c.key, format('%.17g %.0f %.17g', c.j, c.n, c.w)
        end
      end
      if c.stored and not c.n or c.gone and not c.exact then
        forgotten[#forgotten + 1] = c.key
      end
    end
  end
  for i = 1, #found do
    local c = found[i]
    -- What one entry of a key moves to may be where another stood.
    if (c.taken > 0 or c.gone) and not entered[c.old] then
      gone[#gone + 1] = c.old
    end
  end
  if #gone == 0 and #entries == 0 then
    return
  end
  if #entries > 0 then
    call('ZADD', index, unpack(entries))
  end
  if #gone > 0 then
    call('ZREM', index, unpack(gone))
  end
  if #kept > 0 then
    soft('HSET', tags, unpack(kept))
  end
  if #forgotten > 0 then
    soft('HDEL', tags, unpack(forgotten))
  end
  local v = get(q, V[l])
  if not served or v == 0 or get(q, S[l]) > 0 or (get(q, R[l]) > 0 and v < q.rebase) then
    return
  elseif call('EXISTS', index) == 0 then
    put(q, V[l], 0)
    -- Whatever a script that was stopped has left there.
    call('DEL', tags)
  elseif v >= q.rebase then
    rebase(q, l, v)
  end
end

-- Write down what was drawn from a queue.
local function commit(q)
  for l, found in pairs(q.levels) do
    remove_drawn(q, l, found)
  end
  if q.single or q.caps then
    for _, found in pairs(q.levels) do
      for i = 1, #found do
        local c = found[i]
        if (c.taken > 0 or c.full) and is_full(q, c.key) then
          c.gone = true
          block_everywhere(q, c.key)
        end
      end
    end
  end
  for l, found in pairs(q.levels) do
    reindex(q, l, found)
  end
  q.levels, q.stopped = {}, {}
  if q.ready == 0 and q.full == 0 and get(q, 't') + get(q, 'b') > 0 then
    put(q, 't', 0)
    put(q, 'b', 0)
  end
end
