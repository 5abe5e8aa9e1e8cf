-- Moving keys and jobs outside of a take: into the index and out of it, to the front, back from a holder. Needs _sorted.
local made

-- Returns the functions below, by name.
moving = function()
  if made then
    return made
  end

  -- Which job of a key goes next: sequence, weight, whether it was given back; nil if there is none.
  local function head_of(q, l, key)
    if get(q, 'b') > 0 then
      local first = (soft('ZRANGE', front_key(q, l, key), 0, 0) or {})[1]
      if first then
        local sequence, _, weight = parse(first)
        return sequence, weight, true
      end
    end
    local last = soft('LINDEX', jobs_key(q, l, key), -1)
    if last then
      local sequence, _, weight = parse(last)
      return sequence, weight, false
    end
    return nil
  end

  local function count_of(q, l, key)
    local number = soft('LLEN', jobs_key(q, l, key)) or 0
    if get(q, 'b') > 0 then
      number = number + (soft('ZCARD', front_key(q, l, key)) or 0)
    end
    return number
  end

  -- Whether a key's next job stands in the index of its level, or will after a rebase.
  local function is_indexed(q, l, key, front, sequence)
    local member = member_of(front, sequence, key)
    return soft('ZSCORE', q.base .. 'index:' .. l, member)
      or get(q, S[l]) > 0 and soft('ZSCORE', q.base .. 'old:' .. l, member) or nil
  end

  -- Put a key into the index, by `tag` or as one that comes; false if there can be none.
  local function enter(q, l, key, front, sequence, weight, tag)
    tag = tag or entering(q, l, front, sequence, weight_of(q, key, weight))
    local done, failure = soft('ZADD', q.base .. 'index:' .. l, format('%.17g', tag), member_of(front, sequence, key))
    odd(q, 'index:' .. l, failure)
    return done ~= nil
  end

  local function leave_index(q, l, key, front, sequence)
    local member = member_of(front, sequence, key)
    if (soft('ZREM', q.base .. 'index:' .. l, member) or 0) == 0 and get(q, S[l]) > 0 then
      soft('ZREM', q.base .. 'old:' .. l, member)
    end
    soft('HDEL', q.base .. 'tags:' .. l, key)
  end

  -- Note that a key of a level is full, and that its jobs cannot run now.
  local function block(q, l, key)
    if call('SADD', q.base .. 'full', l .. ':' .. key) == 1 then
      q.full = q.full + 1
      add_ready(q, l, -count_of(q, l, key))
    end
  end

  -- Let a key that was full run again, on every level where it has jobs.
  local function unblock(q, key)
    if q.full == 0 or is_full(q, key) then
      return
    end
    local names = {}
    for l = 0, 9 do
      names[l + 1] = l .. ':' .. key
    end
    local blocked = call('SMISMEMBER', q.base .. 'full', unpack(names))
    for l = 0, 9 do
      if blocked[l + 1] == 1 then
        local sequence, weight, front = head_of(q, l, key)
        local entered = true
        if sequence then
          add_ready(q, l, count_of(q, l, key))
          save(q)
          entered = enter(q, l, key, front, sequence, weight)
        end
        if entered then
          call('SREM', q.base .. 'full', names[l + 1])
          q.full = q.full - 1
        end
      end
    end
  end

  -- Put a given-back job before everything newer of its key; false if that is impossible.
  local function put_front(q, l, key, sequence, element)
    local name, entry = front_key(q, l, key), l .. ':' .. key
    local number = int(sequence)
    local there, failure = soft('ZRANGEBYSCORE', name, number, number)
    odd(q, 'front:' .. entry, failure)
    for i = 1, #(there or {}) do
      local _, _, _, stop = parse(there[i])
      local _, _, _, mine = parse(element)
      -- A sequence that was lost counts anew, so the same number need not be the same message.
      if stop and sub(there[i], stop + 1) == sub(element, mine + 1) then
        -- By a script that was stopped then.
        return true
      end
    end
    if not failure then
      local _
      _, failure = soft('ZCARD', q.base .. 'index:' .. l)
      odd(q, 'index:' .. l, failure)
    end
    if failure then
      return false
    end
    local blocked = q.full > 0 and call('SISMEMBER', q.base .. 'full', entry) == 1
    local head, _, front = nil, nil, nil
    if not blocked then
      head, _, front = head_of(q, l, key)
    end
    local full = not blocked and not head and is_full(q, key)
    local first = not blocked and not full and not (head and front and head < sequence)
    add(q, 'b', 1)
    add(q, 't', 1)
    if not blocked and not full then
      add_ready(q, l, 1)
    end
    save(q)
    if full then
      call('SADD', q.base .. 'full', entry)
      q.full = q.full + 1
    elseif first then
      local _, _, weight = parse(element)
      enter(q, l, key, true, sequence, weight)
    end
    call('ZADD', name, number, element)
    if first and head then
      leave_index(q, l, key, front, head)
    end
    return true
  end

  -- Parts of the holder entry of a job that was sorted: level, sequence, deliveries, weight, key, suffix.
  local function sorted_place(place)
    local _, stop, l, sequence, deliveries, weight, size = find(place, '^(%d+):(%d+):(%d+):([^:,]*):(%d+):')
    if not stop then
      return nil
    end
    local last = stop + tonumber(size)
    return tonumber(l), tonumber(sequence), tonumber(deliveries), weight, sub(place, stop + 1, last), sub(place, last + 1)
  end

  -- The base of the queue that a record's suffix names; nil if it names none.
  local function base_of(root, suffix)
    local base = bases[suffix]
    if not base then
      -- ',"","name"]'
      local name = sub(suffix, 6, -3)
      if find(suffix, '\\', 1, true) then
        local fine, parts = pcall(cjson.decode, '[0' .. suffix)
        name = fine and type(parts) == 'table' and parts[3]
        if type(name) ~= 'string' then
          return nil
        end
      end
      base = root .. '{' .. name .. '}:'
      bases[suffix] = base
    end
    return base
  end

  -- Note that a job of a sorted queue is no more in flight.
  local function release(root, tag, place)
    local l, _, _, _, key, suffix = sorted_place(place)
    suffix = suffix or string.match(place, '^%d+:%d+:%d+:(.*)$')
    local kind, base = byte(tag, -1), suffix and base_of(root, suffix)
    if not base then
      return
    elseif kind ~= 107 and soft('HGET', base .. 'lease', 'tag') == tag then
      -- Of a queue with a single active consumer, whose next job may go now.
      call('HDEL', base .. 'lease', 'tag')
    end
    if not l or kind == 108 then
      return
    end
    local removed = soft('SREM', base .. 'running:' .. key, tag) == 1
    local q = open(base)
    if q then
      if removed and q.in_flight[key] then
        q.in_flight[key] = q.in_flight[key] - 1
      end
      -- Also if it was not there: a script may have been stopped between the two.
      unblock(q, key)
    end
  end

  -- Put a held message back where it was: head of source, level and key, in the order first taken. Returns whether there was
  -- one; else its entry goes only: its job was acknowledged when it started, or Kombu's own recovery may find the record.
  -- `started` is added to its deliveries: 1 if its job had begun, 1001 if its worker died meanwhile. A message that has outlived
  -- `most` workers, if that is not 0, goes where an operator finds it.
  local function give_back(root, unacked, unacked_index, holder, tag, place, started, most)
    local l, number, deliveries, weight, key, suffix = sorted_place(place)
    local list = l
    if not l then
      local _
      _, _, list, number, deliveries, suffix = find(place, '^(%d+):(%d+):(%d+):(.*)$')
    end
    local base = suffix and base_of(root, suffix)
    local raw = base and raw_of(unacked, unacked_index, tag, suffix)
    if not raw then
      settle(root, unacked, unacked_index, holder, {'\2' .. tag})
      return false
    end
    local q = l and open(base)
    deliveries = tonumber(deliveries) + started
    local deaths = math.floor(deliveries / 1000)
    if started > 1000 and most > 0 and deaths >= most and soft('XADD', base .. 'dead', '*',
        'reason', format('%d workers died while they held it', deaths), 'list', list, 'key', key or '',
        'weight', weight or '', 'worker', sub(holder, #root + 8), 'message', raw) then
      settle(root, unacked, unacked_index, holder, {tag})
      return true
    end
    if not q or not put_front(q, l, key, number, format('%.0f:%d:%s:', number, deliveries, weight) .. raw) then
      local member = format('%d:%.0f:%d:', list, number, deliveries) .. raw
      if not soft('ZADD', base .. 'returned', int(tonumber(list) * BAND + tonumber(number)), member) then
        -- Its queue cannot be written: it stays where it is, and the others need not wait for it.
        return false
      end
    end
    settle(root, unacked, unacked_index, holder, {tag}, true)
    return true
  end

  made = {
    head_of = head_of,
    count_of = count_of,
    is_indexed = is_indexed,
    enter = enter,
    leave_index = leave_index,
    block = block,
    unblock = unblock,
    put_front = put_front,
    sorted_place = sorted_place,
    base_of = base_of,
    release = release,
    give_back = give_back,
  }
  return made
end
