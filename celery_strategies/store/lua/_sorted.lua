-- Sorted state of a queue: one list of jobs for each key and level, and an index of the keys that may run now.
-- Defines locals only. Every structure of one queue hangs under `base` ('…strategies:{queue}:'):
--   policy  hash: order, single, key, weight (header names), caps, weights ('1' = there are some), next: as below
--   state   hash: v<l> virtual time, r<l> jobs that may run now, t jobs sorted, b given-back jobs,
--           s<l> what an index in the middle of a rebase is still to lose (below zero: it is about to be renamed)
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
--
-- A script may be stopped between any two calls. So counters rise before what they count comes, and fall after it went; a key
-- is in the index, or full, before it has a job, and leaves after its last one. What is too high, or in the index for
-- nothing, is put right by whoever meets it (pick, mend); what is too low would hide jobs.
local REBASE_AT = 1073741824
-- For `b`, when nobody knows how many were given back.
local MANY = 1099511627776
local opened, ruined, bases = {}, {}, {}
-- Names of the fields of `state` that there is one of for each level.
local R = {[0] = 'r0', 'r1', 'r2', 'r3', 'r4', 'r5', 'r6', 'r7', 'r8', 'r9'}
local V = {[0] = 'v0', 'v1', 'v2', 'v3', 'v4', 'v5', 'v6', 'v7', 'v8', 'v9'}
local S = {[0] = 's0', 's1', 's2', 's3', 's4', 's5', 's6', 's7', 's8', 's9'}

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

-- Note what is wrong with a key of ours; the first is told.
local function odd(q, name, failure)
  if failure then
    q.broken = q.broken or name .. ': ' .. failure
  end
end

-- Nothing may run, say the counters. Where there is an index all the same, the state was removed or evicted: begin it anew.
local function mend(q)
  local names = {}
  for l = 0, 9 do
    names[2 * l + 1], names[2 * l + 2] = q.base .. 'index:' .. l, q.base .. 'old:' .. l
  end
  if call('EXISTS', unpack(names)) == 0 then
    return
  end
  for l = 0, 9 do
    local index, old = names[2 * l + 1], names[2 * l + 2]
    local waiting = soft('ZCARD', old) or 0
    if waiting > 0 and get(q, S[l]) == 0 then
      put(q, S[l], math.max(1, tonumber(call('ZRANGE', old, 0, 0, 'WITHSCORES')[2])))
    end
    local edge = soft(q.order == 'turn' and 'ZREVRANGE' or 'ZRANGE', index, 0, 0, 'WITHSCORES') or {}
    if edge[2] then
      waiting = waiting + call('ZCARD', index)
      if get(q, V[l]) == 0 and (q.order == 'fair' or q.order == 'turn') then
        put(q, V[l], math.max(0, tonumber(edge[2])))
      end
    end
    add_ready(q, l, waiting)
  end
  put(q, 't', math.max(get(q, 't'), q.ready))
  put(q, 'b', math.max(get(q, 'b'), MANY))
end

-- The sorted state at `base`; false if there is none, or if it is `ruined`.
local function open(base)
  local q = opened[base]
  if q ~= nil then
    return q
  end
  opened[base] = false
  local policy, failure = soft('HMGET', base .. 'policy', 'order', 'single', 'key', 'weight', 'caps', 'weights', 'rebase')
  local fields, full = nil, nil
  if policy and policy[1] then
    fields, failure = soft('HGETALL', base .. 'state')
    if fields then
      full, failure = soft('SCARD', base .. 'full')
    end
    if full and policy[5] == '1' then
      local _
      _, failure = soft('HLEN', base .. 'caps')
    end
  end
  if failure then
    ruined[base] = failure
    return false
  elseif not full then
    return false
  end
  q = {
    base = base, order = policy[1], single = policy[2] == '1', key_header = policy[3], weight_header = policy[4],
    caps = policy[5] == '1', weights = policy[6] == '1', rebase = tonumber(policy[7]) or REBASE_AT,
    state = {}, dirty = {}, levels = {}, in_flight = {}, uncounted = {}, sound = {}, notes = {}, aside = {},
    before = 0, ready = 0, full = full, stopped = {}, fewer = 0,
  }
  for i = 1, #fields, 2 do
    local value = tonumber(fields[i + 1]) or 0
    q.state[fields[i]] = value
    if byte(fields[i]) == 114 then
      q.ready = q.ready + value
    end
  end
  for l = 0, 9 do
    local shift = get(q, S[l])
    if shift < 0 then
      -- Stopped in the middle of a rebase: the index was renamed, or it was not.
      local renamed = call('EXISTS', base .. 'old:' .. l) == 1
      put(q, S[l], renamed and -shift or 0)
      put(q, V[l], renamed and 0 or get(q, V[l]))
    end
  end
  q.before = q.ready
  if q.ready <= 0 then
    mend(q)
  end
  opened[base] = q
  return q
end

-- Write what changed; say that jobs are ready, or no more.
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

-- The last thing a script does to its queues.
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
    local failure
    number, failure = soft('SCARD', q.base .. 'running:' .. key)
    odd(q, 'running:' .. key, failure)
    -- `uncounted`: it is not full, but it must not run either.
    number, q.uncounted[key] = number or 0, failure
    q.in_flight[key] = number
  end
  return number >= cap
end

local function weight_of(q, key, own)
  if q.order == 'turn' or q.order == 'age' then
    return 1
  end
  local over = nil
  if q.weights then
    local failure
    over, failure = soft('HGET', q.base .. 'weights', '!k' .. key)
    odd(q, 'weights', failure)
  end
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

-- What is hardly ever needed is defined when it is: Redis runs all of a script's definitions in each call. See _moving, _limits.
local moving, limits

-- Settle tags. A tag may begin with \1: acknowledged, but its job still runs (and counts) here; or with \2: that job has
-- ended; or with \3: acknowledged, and it had a permit of a limit. Tags that end with k are in a set of jobs in flight, with l the
-- one job of a lease, with b both. Returns those that were to be acknowledged and were no longer held. Tags are minted once,
-- so removing one that is gone touches nobody else's record. With `keep`, the messages come back and keep their permits.
local function settle(root, unacked, unacked_index, holder, tags, keep)
  local acked, ended, sorted, lost = {}, {}, {}, {}
  for i = 1, #tags do
    local tag, kind = tags[i], byte(tags[i])
    if kind and kind <= 3 then
      tag = sub(tag, 2)
    end
    if kind ~= 2 then
      acked[#acked + 1] = tag
    end
    if kind ~= 1 then
      ended[#ended + 1] = tag
      local last = byte(tag, -1)
      if last == 107 or last == 108 or last == 98 then
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
        moving().release(root, sorted[i], places[i])
      end
    end
  end
  if #ended > 0 then
    if call('EXISTS', root .. 'limited:' .. sub(holder, #root + 8)) == 1 then
      limits().give_up(root, holder, ended, keep)
    end
    -- The last: while it is there, all this will be said again.
    call('HDEL', holder, unpack(ended))
  end
  return lost
end
