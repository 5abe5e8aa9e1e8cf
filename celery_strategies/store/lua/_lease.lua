-- The lease of a queue with a single active consumer. Defines locals only; needs _sorted.
--   lease              hash: worker, term (its fencing number), until (milliseconds), tag (of the one job in flight), late (once
--                      it was found to have run out: until when it is left to its owner all the same)
--   free               string: there while nobody has the lease; those who stand by track it
--   leases:<worker>    set of the bases of the queues whose lease a worker has

-- Milliseconds for which a lease that has run out is left to its owner: after a pause of Redis itself, its beat is on its way.
local LATE = 2000

-- Give up a lease, if a worker has it. The term stays, so that the next one is higher.
local function give_up_lease(root, base, worker)
  if soft('HGET', base .. 'lease', 'worker') == worker then
    call('HDEL', base .. 'lease', 'worker', 'until', 'late')
    call('SET', base .. 'free', '1', 'PX', 60000)
    call('SREM', root .. 'leases:' .. worker, base)
  end
end

local function give_up_leases(root, worker)
  local bases = call('SRANDMEMBER', root .. 'leases:' .. worker, 1000)
  for i = 1, #bases do
    give_up_lease(root, bases[i], worker)
  end
  call('DEL', root .. 'leases:' .. worker)
end

-- Take up the lease of a queue, or keep it; returns its term: 0 if it is this worker's but its job is in flight, or below zero
-- the milliseconds until somebody else's runs out. The job of a leader whose lease has run out goes back first, so that the
-- order holds.
local function lead(root, base, worker, now, ttl, unacked, unacked_index)
  local name = base .. 'lease'
  local lease = soft('HMGET', name, 'worker', 'term', 'until', 'tag', 'late')
  if not lease then
    -- Nothing of ours is left of it: the queue waits for an operator.
    return -ttl
  end
  local mine, tag, late = lease[1] == worker, lease[4], tonumber(lease[5] or 0)
  if lease[1] and not mine then
    local ends = tonumber(lease[3] or 0)
    if ends <= now and late == 0 then
      late = now + LATE
      call('HSET', name, 'late', int(late))
    end
    if math.max(ends, late) > now then
      return math.min(-1, math.floor(now - math.max(ends, late)))
    end
  end
  if tag then
    local before = string.match(tag, '^(.*):[^:]*$')
    local holder = root .. 'holder:' .. (before or '')
    local place = call('HGET', holder, tag)
    if place and mine then
      return 0
    elseif place then
      if not moving().give_back(root, unacked, unacked_index, holder, tag, place, 1, 0) and call('HEXISTS', holder, tag) == 1 then
        -- Its job cannot go back, so nobody may go on.
        return -ttl
      end
    end
    call('HDEL', name, 'tag')
  end
  if late > 0 then
    call('HDEL', name, 'late')
  end
  if mine then
    -- Who takes now may start the job while this lasts.
    call('HSET', name, 'until', int(now + ttl))
    return tonumber(lease[2])
  end
  if lease[1] then
    call('SREM', root .. 'leases:' .. lease[1], base)
  end
  -- Terms rise even if the last writes were lost in a fail-over.
  local term = math.max(tonumber(lease[2] or 0) + 1, math.floor(now))
  call('HSET', name, 'worker', worker, 'term', int(term), 'until', int(now + ttl))
  call('SADD', root .. 'leases:' .. worker, base)
  call('DEL', base .. 'free')
  return term
end

-- A worker that is gone reads nothing any more. `entry` is what it said of itself. A watch, or a wake that it did not
-- come to, goes to one that is parked.
local function forget_consumer(root, entry, worker)
  local ok, queues = pcall(cjson.decode, soft('HGET', entry, 'queues') or '[]')
  local wake = root .. 'wake:' .. worker
  local woken = call('DEL', wake)
  if ok and type(queues) == 'table' then
    for i = 1, #queues do
      local base = root .. '{' .. queues[i] .. '}:'
      try('ZREM', base .. 'consumers', worker)
      try('ZREM', base .. 'parked', wake)
      local watched = try('ZREM', base .. 'watchers', wake) == 1
      if woken == 1 or watched and call('EXISTS', base .. 'watchers') == 0 then
        wake_parked(base .. 'parked', 1)
      end
    end
  end
end
