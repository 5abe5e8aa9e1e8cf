-- Sorting a queue's new jobs by key, and drawing the next ones. Defines locals only; needs _sorted.
-- Returns `sort`. Redis runs all of a script's definitions in each call; those of sorting are hardly ever needed.
local function new_sort()
  -- Messages read from a list at once while sorting: a few, since nobody knows how large they are.
  local CHUNK = 8

  -- Milliseconds since the epoch that an ISO 8601 time with an offset means; nil for any other text.
  local function milliseconds(text)
    local year, month, day, hour, minute, second, rest = string.match(
      text, '^(%d%d%d%d)%-(%d%d)%-(%d%d)[T ](%d%d):(%d%d):(%d%d)(.*)$')
    if not year then
      return nil
    end
    local fraction, zone = string.match(rest, '^(%.%d+)(.*)$')
    zone = zone or rest
    local sign, zone_hour, zone_minute = string.match(zone, '^([+-])(%d%d):?(%d%d)$')
    local offset = 0
    if sign then
      offset = (tonumber(zone_hour) * 60 + tonumber(zone_minute)) * (sign == '+' and 60 or -60)
    elseif zone ~= 'Z' then
      return nil
    end
    local before = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334}
    year, month = tonumber(year), tonumber(month)
    if not before[month] then
      return nil
    end
    local past = year - 1
    local days = past * 365 + math.floor(past / 4) - math.floor(past / 100) + math.floor(past / 400)
    if month > 2 and year % 4 == 0 and (year % 100 ~= 0 or year % 400 == 0) then
      days = days + 1
    end
    days = days + before[month] + tonumber(day) - 1 - 719162
    local seconds = days * 86400 + tonumber(hour) * 3600 + tonumber(minute) * 60 + tonumber(second) - offset
    return seconds * 1000 + math.floor(tonumber(fraction or '0') * 1000)
  end

  -- The key ('' = none) and the weight ('' = 1) in a message's headers, and what was wrong with them, if anything was.
  local function tag_of(q, message)
    local key, weight, wrong = message.headers[q.key_header], nil, nil
    if key == nil or key == cjson.null then
      key = ''
    elseif type(key) == 'number' and key == math.floor(key) and math.abs(key) < 1e15 then
      key = int(key)
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
    local id = try('XADD', names.set_aside, '*', 'reason', reason, 'list', list, 'worker', worker, 'message', raw)
    if type(id) == 'table' then
      q.broken = id.err
      return false
    end
    local m = #q.aside
    q.aside[m + 1], q.aside[m + 2] = id, reason
    return true
  end

  -- Whether the keys that a new job of a level goes to have the types they should have; a script must not stop between
  -- its writes.
  local function sound(q, l)
    if q.sound[l] == nil then
      for _, probe in ipairs({{'ZCARD', 'index:' .. l}, {'HLEN', 'tags:' .. l}, {'SCARD', 'full'}, {'ZCARD', 'delayed'}}) do
        local answer = try(probe[1], q.base .. probe[2])
        if type(answer) == 'table' then
          q.broken = probe[2] .. ': ' .. answer.err
        end
      end
      q.sound[l] = not q.broken
    end
    return q.sound[l]
  end

  -- Put a new job where it belongs: with the group of its key in `jobs`, or among those that are not due yet. False if it
  -- must stay where it is.
  local function classify(q, names, jobs, raw, list, l, now, worker)
    local reason, message = problem(raw)
    if reason then
      return put_aside(q, names, worker, list, reason, raw)
    end
    local eta = message.headers.eta
    local due = type(eta) == 'string' and milliseconds(eta)
    if due and due > now then
      jobs.later[#jobs.later + 1] = {list, due, raw}
      return true
    end
    local key, weight, wrong = tag_of(q, message)
    note(q, wrong)
    local name = l .. ':' .. key
    local group = jobs.groups[name]
    if not group then
      group = {l = l, key = key}
      jobs.groups[name], jobs.order[#jobs.order + 1] = group, group
    end
    local retries = q.single and key ~= '' and tonumber(message.headers.retries)
    jobs.count = jobs.count + 1
    -- Its place among all that is sorted now: keys are compared by the age of their jobs.
    group[#group + 1] = {weight, raw, retries and retries > 0, jobs.count}
    return true
  end

  -- Add the sorted jobs of one key, oldest first.
  local function append(q, names, group, sequence, worker)
    local l, key = group.l, group.key
    local elements, first = {}, nil
    for i = 1, #group do
      local weight, raw, again, number = unpack(group[i], 1, 4)
      local element = format('%.0f:0:%s:', sequence + number, weight) .. raw
      if again then
        -- A retry goes before what its group has waiting, or their order would be lost.
        put_front(q, l, key, sequence + number, element)
      else
        elements[#elements + 1] = element
        first = first or {sequence + number, weight}
      end
    end
    if #elements == 0 then
      return
    end
    local length = try('LPUSH', jobs_key(q, l, key), unpack(elements))
    if type(length) == 'table' then
      for i = 1, #group do
        put_aside(q, names, worker, l, 'the list of its key is none', group[i][2])
      end
      return
    end
    add(q, 't', #elements)
    local active = length > #elements or get(q, 'b') > 0 and call('EXISTS', front_key(q, l, key)) == 1
    if active then
      if get(q, 'f') == 0 or call('SISMEMBER', q.base .. 'full', l .. ':' .. key) == 0 then
        add_ready(q, l, #elements)
      end
    elseif is_full(q, key) then
      call('SADD', q.base .. 'full', l .. ':' .. key)
      add(q, 'f', 1)
    else
      enter(q, l, key, false, first[1], first[2])
      add_ready(q, l, #elements)
    end
  end

  -- Sort up to `budget.messages` messages or `budget.bytes` bytes of a queue's inbox, and what others gave back unsorted.
  -- `inbox` names the lists, `numbers` their list numbers, `lengths` their lengths, which it lowers. Every message is in its
  -- new place before it leaves the old one. Returns the number of messages left.
  local function sort(q, names, inbox, numbers, lengths, levels, budget, now, worker)
    local jobs = {groups = {}, order = {}, later = {}, count = 0}
    local trims, left = {}, 0
    local function level(list)
      return levels > 0 and math.min(list, levels - 1) or list
    end
    if lengths[0] and lengths[0] > 0 and sound(q, 0) then
      local members = call('ZRANGE', names.returned, 0, math.min(64, budget.messages) - 1)
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
          local key, weight, wrong = tag_of(q, message)
          note(q, wrong)
          moved = sound(q, level(tonumber(list)))
          if moved then
            put_front(q, level(tonumber(list)), key, tonumber(place), format('%s:%s:%s:', place, deliveries, weight) .. raw)
          end
        end
        budget.messages, budget.bytes = budget.messages - 1, budget.bytes - #members[i]
        if not moved then
          break
        end
        call('ZREM', names.returned, members[i])
        lengths[0] = lengths[0] - 1
      end
      left = left + lengths[0]
    end
    for i = 1, #inbox do
      local length, done, l = lengths[i] or 0, 0, level(numbers[i])
      local go_on = length > 0 and sound(q, l)
      while go_on and done < length and budget.messages > 0 and budget.bytes > 0 do
        local chunk = math.min(done == 0 and 1 or CHUNK, budget.messages, length - done)
        local found = call('LRANGE', inbox[i], -done - chunk, -done - 1)
        go_on = #found == chunk
        for j = #found, 1, -1 do
          if budget.bytes <= 0 then
            break
          end
          go_on = classify(q, names, jobs, found[j], numbers[i], l, now, worker)
          if not go_on then
            break
          end
          done = done + 1
          budget.messages, budget.bytes = budget.messages - 1, budget.bytes - #found[j]
        end
      end
      trims[i], lengths[i] = done, length - done
      left = left + lengths[i]
    end
    if jobs.count + #jobs.later > 0 then
      local last = call('INCRBY', names.sequence, jobs.count + #jobs.later)
      local sequence = last - jobs.count - #jobs.later
      for i = 1, #jobs.order do
        append(q, names, jobs.order[i], sequence, worker)
      end
      sequence = sequence + jobs.count
      for i = 1, #jobs.later do
        local list, due, raw = unpack(jobs.later[i])
        call('ZADD', q.base .. 'delayed', int(due), format('%016.0f:%d:', sequence + i, list) .. raw)
      end
    end
    for i, done in pairs(trims) do
      if done > 0 then
        call('LTRIM', inbox[i], 0, -done - 1)
      end
    end
    return left
  end

  return sort
end

-- The keys of a level that may run, up to n of them, best first. During a rebase the best of the old index move first.
local function candidates(q, l, n)
  local found = q.levels[l]
  if found then
    return found
  end
  local index, tags = q.base .. 'index:' .. l, q.base .. 'tags:' .. l
  local shift = get(q, S[l])
  if shift > 0 then
    local old = call('ZRANGE', q.base .. 'old:' .. l, 0, 63, 'WITHSCORES')
    for i = 1, #old, 2 do
      local key = sub(old[i], 18)
      call('ZADD', index, format('%.17g', tonumber(old[i + 1]) - shift), old[i])
      local j, rest = string.match(call('HGET', tags, key) or '', '^(%S+)( .*)$')
      if j then
        call('HSET', tags, key, format('%.17g', tonumber(j) - shift) .. rest)
      end
    end
    if #old > 0 then
      call('ZREMRANGEBYRANK', q.base .. 'old:' .. l, 0, #old / 2 - 1)
    end
    if #old < 128 then
      put(q, S[l], 0)
    end
  end
  found = {}
  local entries = call('ZRANGE', index, 0, n - 1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    local member = entries[i]
    found[#found + 1] = {
      member = member, old = member, tag = tonumber(entries[i + 1]), key = sub(member, 18), front = byte(member) == 33,
      used = 0, fronts = {}, rank = 0, taken = 0,
    }
  end
  q.levels[l] = found
  return found
end

-- The head of a candidate: its element, nil if there is none.
local function element_of(q, l, c)
  if c.front then
    return call('ZRANGE', front_key(q, l, c.key), #c.fronts, #c.fronts)[1]
  end
  if c.ahead and c.used > 0 then
    local element = c.ahead
    c.ahead = nil
    return element
  end
  -- With the one behind it, whose place in the index is asked for next.
  local found = call('LRANGE', jobs_key(q, l, c.key), -c.used - 2, -c.used - 1)
  c.ahead = #found == 2 and found[1] or nil
  return found[#found]
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
  c.element = element_of(q, l, c)
  if was_front and not c.element then
    c.front = false
    c.element = element_of(q, l, c)
  end
  c.full = c.element ~= nil and is_full(q, key)
  if not c.element or c.full then
    c.gone = true
    return
  end
  c.sequence, c.deliveries, c.own, c.stop = parse(c.element)
  if not c.sequence then
    -- None of ours; the next pick drops it.
    c.gone = true
    return
  end
  local sequence = c.sequence
  c.member = member_of(c.front, sequence, key)
  local next_weight = weight_of(q, key, c.own)
  c.weight = next_weight
  if q.order == 'age' or q.order == 'turn' then
    c.tag = entering(q, l, c.front, sequence, next_weight)
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
      local j, n, w = string.match(call('HGET', q.base .. 'tags:' .. l, key) or '', '^(%S+) (%S+) (%S+)$')
      c.known, c.j, c.n, c.w = true, tonumber(j), tonumber(n), tonumber(w)
      c.stored = c.n ~= nil
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

-- Choose the next job of a level and plan its move; nil if nothing may run. Writes nothing.
local function pick(q, l, n)
  local found = candidates(q, l, n)
  while true do
    local best
    for i = 1, #found do
      local c = found[i]
      if not c.gone and (not best or c.tag < best.tag or (c.tag == best.tag and c.member < best.member)) then
        best = c
      end
    end
    if not best then
      -- There may be others behind them.
      q.more = q.more or #found == n
      if #found == 0 and get(q, S[l]) == 0 then
        -- Whoever removed a key's jobs by hand did not lower the counter.
        add_ready(q, l, -get(q, R[l]))
      end
      return nil
    end
    if not best.element then
      best.element = element_of(q, l, best)
      if best.element then
        best.sequence, best.deliveries, best.own, best.stop = parse(best.element)
      end
    end
    if is_full(q, best.key) then
      -- Its cap was lowered.
      best.full, best.gone = true, true
    elseif not best.sequence then
      best.gone = true
    else
      return best
    end
  end
end

-- Plan that a candidate's head is taken. Returns message, sequence, deliveries and weight of it.
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

-- How many jobs of a key this call has drawn from a level.
local function drawn(q, l, key)
  for _, c in ipairs(q.levels[l] or {}) do
    if c.key == key then
      return c.taken
    end
  end
  return 0
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
      local sequence, _, front = head_of(q, l, key)
      if sequence then
        leave_index(q, l, key, front, sequence)
        block(q, l, key)
      end
    end
  end
end

-- Give the keys of a level that were drawn from their new places in the index, or none.
local function reindex(q, l, found)
  local index, tags = q.base .. 'index:' .. l, q.base .. 'tags:' .. l
  local gone, entries, kept, forgotten = {}, {}, {}, {}
  for i = 1, #found do
    local c = found[i]
    if c.taken > 0 or c.gone then
      if c.gone or c.member ~= c.old then
        gone[#gone + 1] = c.old
      end
      if not c.gone then
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
  if #entries > 0 then
    call('ZADD', index, unpack(entries))
  end
  if #gone > 0 then
    call('ZREM', index, unpack(gone))
  end
  if #kept > 0 then
    call('HSET', tags, unpack(kept))
  end
  if #forgotten > 0 then
    call('HDEL', tags, unpack(forgotten))
  end
  if #gone == 0 and #entries == 0 then
    return
  end
  local v = get(q, V[l])
  if get(q, S[l]) == 0 and get(q, R[l]) <= 0 and call('EXISTS', index) == 0 then
    put(q, V[l], 0)
    if get(q, 'f') == 0 and q.ready == 0 then
      put(q, 't', 0)
      put(q, 'b', 0)
    end
  elseif v >= q.rebase and get(q, S[l]) == 0 then
    call('RENAME', index, q.base .. 'old:' .. l)
    put(q, S[l], v)
    put(q, V[l], 0)
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
  q.levels = {}
end
