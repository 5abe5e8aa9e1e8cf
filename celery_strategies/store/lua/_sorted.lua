-- Sorted state of a queue: one list of jobs for each key and level, and an index of the keys that may run now.
-- Defines locals only. Every structure of one queue hangs under `base` ('…strategies:{queue}:'):
--   policy  hash: order, single, key, weight (header names), caps, weights ('1' = there are some), next: as below
--   state   hash: v<l> virtual time, r<l> jobs that may run now, t jobs sorted, f keys that are full, b given-back jobs,
--           s<l> what an index in the middle of a rebase is still to lose
--   index:<l>, old:<l>  zset: finish tag -> '0' or '!', 16 digits of the head's sequence, key
--   tags:<l>            hash: key -> 'J n w', only while it cannot be told from the finish tag
--   jobs:<l>:<key>      list, next to run at the right: 'sequence:deliveries:weight:message'
--   front:<l>:<key>     zset: sequence -> the same, given back
--   dead                stream: messages that outlived too many workers
--   running:<key>       set of the tags in flight, where there are caps or groups
--   unsorted            list: 'level:message', on the way back to the inbox
--   full                set of '<l>:<key>': keys with jobs that wait for one in flight to end
--   caps                hash: 'k' .. key or '*' -> number, as configured; the same after '!', as changed while running
--   weights             hash: '!k' .. key -> number, as changed while running
--   ready               string: there iff a sorted job may run now
local REBASE_AT = 1073741824
local opened, bases = {}, {}
-- Names of the fields of `state` that there is one of for each level.
local R = {[0] = 'r0', 'r1', 'r2', 'r3', 'r4', 'r5', 'r6', 'r7', 'r8', 'r9'}
local V = {[0] = 'v0', 'v1', 'v2', 'v3', 'v4', 'v5', 'v6', 'v7', 'v8', 'v9'}
local S = {[0] = 's0', 's1', 's2', 's3', 's4', 's5', 's6', 's7', 's8', 's9'}

local function open(base)
  local q = opened[base]
  if q ~= nil then
    return q
  end
  local policy = call('HMGET', base .. 'policy', 'order', 'single', 'key', 'weight', 'caps', 'weights', 'rebase')
  if not policy[1] then
    opened[base] = false
    return false
  end
  q = {
    base = base, order = policy[1], single = policy[2] == '1', key_header = policy[3], weight_header = policy[4],
    caps = policy[5] == '1', weights = policy[6] == '1', rebase = tonumber(policy[7]) or REBASE_AT,
    state = {}, dirty = {}, levels = {}, in_flight = {}, sound = {}, notes = {}, aside = {}, before = 0, ready = 0,
  }
  local fields = call('HGETALL', base .. 'state')
  for i = 1, #fields, 2 do
    local value = tonumber(fields[i + 1])
    q.state[fields[i]] = value
    if byte(fields[i]) == 114 then
      q.ready = q.ready + value
    end
  end
  q.before = q.ready
  opened[base] = q
  return q
end

local function get(q, name)
  return q.state[name] or 0
end

local function put(q, name, value)
  q.state[name], q.dirty[name] = value, true
end

local function add(q, name, value)
  put(q, name, get(q, name) + value)
end

-- Change the number of jobs of a level that may run now; `q.ready` is that of all levels.
local function add_ready(q, l, value)
  local before = get(q, R[l])
  value = math.max(value, -before)
  q.ready = q.ready + value
  put(q, R[l], before + value)
end

-- Write what changed; say that jobs are ready, or no more. The last thing a script does to a queue.
local function save(q)
  local set, gone = {}, {}
  for name in pairs(q.dirty) do
    local value = q.state[name]
    if value <= 0 then
      gone[#gone + 1] = name
    else
      set[#set + 1], set[#set + 2] = name, format('%.17g', value)
    end
  end
  if #set > 0 then
    call('HSET', q.base .. 'state', unpack(set))
  end
  if #gone > 0 then
    call('HDEL', q.base .. 'state', unpack(gone))
  end
  q.dirty = {}
  local after = q.ready
  if after > 0 and q.before == 0 then
    call('SET', q.base .. 'ready', '1')
  elseif after == 0 and q.before > 0 then
    call('DEL', q.base .. 'ready')
  end
  q.before = after
end

local function save_all()
  for _, q in pairs(opened) do
    if q then
      save(q)
    end
  end
end

-- Jobs of `key` that may be in flight at once, nil = any number. Unkeyed jobs are in no group and nobody's.
local function cap_of(q, key)
  if key == '' then
    return nil
  elseif q.single then
    return 1
  elseif q.caps then
    local found = call('HMGET', q.base .. 'caps', '!k' .. key, 'k' .. key, '!*', '*')
    return tonumber(found[1] or found[2] or found[3] or found[4] or nil)
  end
  return nil
end

local function is_full(q, key)
  local cap = cap_of(q, key)
  if not cap then
    return false
  end
  local number = q.in_flight[key]
  if not number then
    number = call('SCARD', q.base .. 'running:' .. key)
    q.in_flight[key] = number
  end
  return number >= cap
end

local function weight_of(q, key, own)
  if q.order == 'turn' or q.order == 'age' then
    return 1
  end
  local over = q.weights and call('HGET', q.base .. 'weights', '!k' .. key)
  return tonumber(over or own) or 1
end

local function jobs_key(q, l, key)
  return q.base .. 'jobs:' .. l .. ':' .. key
end

local function front_key(q, l, key)
  return q.base .. 'front:' .. l .. ':' .. key
end

-- Parts of an element of a key's list or front; nil for one that is none of ours.
local function parse(element)
  local _, stop, sequence, deliveries, weight = find(element, '^(%d+):(%d+):([^:]*):')
  if not stop then
    return nil
  end
  return tonumber(sequence), tonumber(deliveries), weight, stop
end

local function member_of(front, sequence, key)
  return format(front and '!%016.0f%s' or '0%016.0f%s', sequence, key)
end

-- The finish tag with which a key (again) enters the index. A job given back was paid for when it was first taken.
local function entering(q, l, front, sequence, weight)
  if q.order == 'age' then
    return front and -1 or sequence
  elseif q.order == 'batch' then
    return 1 / weight
  end
  local v = get(q, V[l])
  if q.order == 'turn' then
    -- A counter of turns: whoever enters, or was served, goes to the tail.
    if front then
      return -1
    end
    put(q, V[l], v + 1)
    return v + 1
  end
  return front and v or v + 1 / weight
end

-- Which job of a key goes next: sequence, weight, whether it was given back; nil if there is none.
local function head_of(q, l, key)
  if get(q, 'b') > 0 then
    local first = call('ZRANGE', front_key(q, l, key), 0, 0)[1]
    if first then
      local sequence, _, weight = parse(first)
      return sequence, weight, true
    end
  end
  local last = call('LINDEX', jobs_key(q, l, key), -1)
  if last then
    local sequence, _, weight = parse(last)
    return sequence, weight, false
  end
  return nil
end

local function count_of(q, l, key)
  local number = call('LLEN', jobs_key(q, l, key))
  if get(q, 'b') > 0 then
    number = number + call('ZCARD', front_key(q, l, key))
  end
  return number
end

local function enter(q, l, key, front, sequence, weight)
  local tag = entering(q, l, front, sequence, weight_of(q, key, weight))
  call('ZADD', q.base .. 'index:' .. l, format('%.17g', tag), member_of(front, sequence, key))
end

local function leave_index(q, l, key, front, sequence)
  local member = member_of(front, sequence, key)
  if call('ZREM', q.base .. 'index:' .. l, member) == 0 and get(q, S[l]) > 0 then
    call('ZREM', q.base .. 'old:' .. l, member)
  end
  call('HDEL', q.base .. 'tags:' .. l, key)
end

-- Note that a key of a level is full, and that its jobs cannot run now.
local function block(q, l, key)
  if call('SADD', q.base .. 'full', l .. ':' .. key) == 1 then
    add(q, 'f', 1)
    add_ready(q, l, -count_of(q, l, key))
  end
end

-- Let a key that was full run again, on every level where it has jobs.
local function unblock(q, key)
  if get(q, 'f') == 0 or is_full(q, key) then
    return
  end
  for l = 0, 9 do
    if call('SREM', q.base .. 'full', l .. ':' .. key) == 1 then
      add(q, 'f', -1)
      local sequence, weight, front = head_of(q, l, key)
      if sequence then
        enter(q, l, key, front, sequence, weight)
        add_ready(q, l, count_of(q, l, key))
      end
    end
  end
end

-- Put a given-back job before everything newer of its key.
local function put_front(q, l, key, sequence, element)
  local blocked = get(q, 'f') > 0 and call('SISMEMBER', q.base .. 'full', l .. ':' .. key) == 1
  local head, _, front = nil, nil, nil
  if not blocked then
    head, _, front = head_of(q, l, key)
  end
  if call('ZADD', front_key(q, l, key), int(sequence), element) == 0 then
    return
  end
  add(q, 'b', 1)
  add(q, 't', 1)
  if blocked then
    return
  end
  if not head and is_full(q, key) then
    call('SADD', q.base .. 'full', l .. ':' .. key)
    add(q, 'f', 1)
    return
  end
  add_ready(q, l, 1)
  if head and not (front and head < sequence) then
    leave_index(q, l, key, front, head)
    head = nil
  end
  if not head then
    local _, _, weight = parse(element)
    enter(q, l, key, true, sequence, weight)
  end
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

-- The base of the queue that a record's suffix names.
local function base_of(root, suffix)
  local base = bases[suffix]
  if not base then
    -- ',"","name"]'
    local name = find(suffix, '\\', 1, true) and cjson.decode('[0' .. suffix)[3] or sub(suffix, 6, -3)
    base = root .. '{' .. name .. '}:'
    bases[suffix] = base
  end
  return base
end

-- Note that a job of a sorted queue is no more in flight.
local function release(root, tag, place)
  local l, _, _, _, key, suffix = sorted_place(place)
  if not l then
    return
  end
  local base = base_of(root, suffix)
  if call('SREM', base .. 'running:' .. key, tag) == 1 then
    local q = open(base)
    if q then
      if q.in_flight[key] then
        q.in_flight[key] = q.in_flight[key] - 1
      end
      unblock(q, key)
    end
  end
end

-- Gives up the permits that tags have in limits; set by _limits.lua.
local give_up

-- Settle tags. A tag may begin with \1: acknowledged, but its job still runs (and counts) here; or with \2: that job has
-- ended; or with \3: acknowledged, and it had a permit of a limit. Tags that end with k are in a set of jobs in flight. Returns
-- those that were to be acknowledged and were no longer held. Tags are minted once, so removing one that is gone touches
-- nobody else's record. With `keep`, the messages come back and keep their permits.
local function settle(root, unacked, unacked_index, holder, tags, keep)
  local acked, ended, sorted, lost = {}, {}, {}, {}
  for i = 1, #tags do
    local tag, kind = tags[i], byte(tags[i])
    if kind <= 3 then
      tag = sub(tag, 2)
    end
    if kind ~= 2 then
      acked[#acked + 1] = tag
    end
    if kind ~= 1 then
      ended[#ended + 1] = tag
      if byte(tag, -1) == 107 then
        sorted[#sorted + 1] = tag
      end
    end
  end
  if #acked > 0 then
    local scores = call('ZMSCORE', unacked_index, unpack(acked))
    for i = 1, #acked do
      if not scores[i] then
        lost[#lost + 1] = acked[i]
      end
    end
    call('HDEL', unacked, unpack(acked))
    call('ZREM', unacked_index, unpack(acked))
  end
  if #sorted > 0 then
    local places = call('HMGET', holder, unpack(sorted))
    for i = 1, #sorted do
      if places[i] then
        release(root, sorted[i], places[i])
      end
    end
  end
  if #ended > 0 then
    give_up(root, holder, ended, keep)
    call('HDEL', holder, unpack(ended))
  end
  return lost
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
  local raw = suffix and raw_of(unacked, unacked_index, tag, suffix)
  if not raw then
    settle(root, unacked, unacked_index, holder, {'\2' .. tag})
    return false
  end
  local base = base_of(root, suffix)
  local q = l and open(base)
  deliveries = tonumber(deliveries) + started
  local deaths = math.floor(deliveries / 1000)
  if started > 1000 and most > 0 and deaths >= most then
    call('XADD', base .. 'dead', '*', 'reason', format('%d workers died while they held it', deaths), 'list', list,
      'key', key or '', 'weight', weight or '', 'worker', sub(holder, #root + 8), 'message', raw)
    settle(root, unacked, unacked_index, holder, {tag})
    return true
  end
  if q then
    put_front(q, l, key, number, format('%.0f:%d:%s:', number, deliveries, weight) .. raw)
  else
    local member = format('%d:%.0f:%d:', list, number, deliveries) .. raw
    call('ZADD', base .. 'returned', int(tonumber(list) * BAND + tonumber(number)), member)
  end
  settle(root, unacked, unacked_index, holder, {tag}, true)
  return true
end
