-- Permits of the limits of tasks. Needs _moving; settle() in _sorted gives permits up. A limit is named
-- 'task or group:key', a message by the number of its first take, which it keeps until it is settled:
--   permits:<limit>   zset: number -> when its permit expires, in milliseconds
--   line:<limit>      zset: number -> number and record suffix of a message that waits for a permit
--   lines             zset: limit -> when to look at its line again, in milliseconds
--   limits            hash: limit -> 'to:duration', as the last message that had to wait said; only while there is a line
--   limited:<worker>  hash: tag -> 'number:duration:limit' of the permits that a worker's jobs have
--   {queue}:in_line   zset: number -> 's' (sorted) or 'p' (plain), its place as in the holder, without suffix, message
-- Messages of a line and bytes that one call moves at most.
local LINE_STEP, LINE_BYTES = 64, 262144
local rules

-- Returns the functions below, by name.
limits = function()
  if rules then
    return rules
  end
  local M = moving()
  local sorted_place, base_of, put_front = M.sorted_place, M.base_of, M.put_front

  local function is_error(answer)
    return type(answer) == 'table' and answer.err
  end

  -- Server time in milliseconds.
  local function milliseconds_now(injected)
    return math.floor(clock(injected) / 1000)
  end

  local function occupy(root, limit, number, duration, now)
    local permits = root .. 'permits:' .. limit
    call('ZADD', permits, int(now + duration), number)
    -- What expired is dropped by whoever looks; this is for limits that nobody looks at any more.
    call('PEXPIRE', permits, int(math.max(86400000, 2 * duration)))
  end

  -- Parts of a message that stands in line: list, number, deliveries, message, and if it was sorted, weight and key.
  local function parts_of(entry)
    if byte(entry) == 115 then
      local level, number, deliveries, weight, key, raw = sorted_place(sub(entry, 2))
      return level, number, deliveries, raw, weight, key
    end
    local _, stop, list, number, deliveries = find(entry, '^p(%d+):(%d+):(%d+):')
    return tonumber(list), tonumber(number), deliveries, stop and sub(entry, stop + 1)
  end

  -- Have a message that stood in line wait with the given-back ones; false if that is impossible.
  local function put_returned(returned, list, number, deliveries, raw)
    local member = format('%d:%.0f:%d:', list, number, deliveries) .. raw
    return not is_error(try('ZADD', returned, int(list * BAND + number), member))
  end

  -- Put a message that stood in line where it would be had it been given back; false if that is impossible.
  local function put_back(base, entry)
    local list, number, deliveries, raw, weight, key = parts_of(entry)
    if not list then
      return false
    end
    if key then
      local q = open(base)
      if q and put_front(q, list, key, number, format('%.0f:%d:%s:', number, deliveries, weight) .. raw) then
        return true
      end
    end
    return put_returned(base .. 'returned', list, number, deliveries, raw)
  end

  -- Give the free permits of a limit to those first in its line. `mine` is the number of a message that asks for one itself.
  -- Returns how many others got one, whether `mine` did, and the bytes moved.
  local function serve_line(root, limit, now, mine)
    local permits, line = root .. 'permits:' .. limit, root .. 'line:' .. limit
    local rule = call('HGET', root .. 'limits', limit) or ''
    local _, _, to, duration = find(rule, '^(%d+):(%d+)$')
    -- Whoever removed the rule by hand has one at a time.
    to, duration = tonumber(to or 1), tonumber(duration or 300000)
    call('ZREMRANGEBYSCORE', permits, '-inf', int(now))
    local free, served, got, bytes, again = to - call('ZCARD', permits), 0, false, 0, 0
    local first = free > 0 and call('ZRANGE', line, 0, LINE_STEP - 1) or {}
    for i = 1, #first do
      if free <= 0 or bytes >= LINE_BYTES then
        break
      end
      local _, _, number, suffix = find(first[i], '^(%d+)(,.*)$')
      if number and number == mine then
        occupy(root, limit, number, duration, now)
        got, free = true, free - 1
      else
        -- A message that is not there any more was purged, or nothing of ours stands here.
        local base = suffix and base_of(root, suffix)
        local found = base and try('ZRANGEBYSCORE', base .. 'in_line', number, number, 'LIMIT', 0, 1)
        local entry = found and found[1]
        if entry then
          occupy(root, limit, number, duration, now)
          if not put_back(base, entry) then
            -- Its queue cannot be written: it waits for an operator, and the others with it.
            call('ZREM', permits, number)
            again = 5000
            break
          end
          -- Whatever a call that failed halfway left of it goes too.
          call('ZREMRANGEBYSCORE', base .. 'in_line', number, number)
          served, free, bytes = served + 1, free - 1, bytes + #entry
        end
      end
      call('ZREM', line, first[i])
    end
    if call('EXISTS', line) == 0 then
      call('ZREM', root .. 'lines', limit)
      call('HDEL', root .. 'limits', limit)
    else
      local soonest = call('ZRANGE', permits, 0, 0, 'WITHSCORES')[2]
      call('ZADD', root .. 'lines', int((free > 0 or not soonest) and now + again or soonest), limit)
    end
    return served, got, bytes
  end

  -- Give up the permits that tags have: the next in line get them. With `keep`, the messages come back and keep theirs.
  local function give_up(root, holder, tags, keep)
    local limited = root .. 'limited:' .. sub(holder, #root + 8)
    if call('EXISTS', limited) == 0 then
      return
    end
    local found = try('HMGET', limited, unpack(tags))
    for i = 1, #tags do
      local _, _, number, limit = find(found[i] or '', '^(%d+):%d+:(.*)$')
      if number and not keep then
        try('ZREM', root .. 'permits:' .. limit, number)
        if call('EXISTS', root .. 'line:' .. limit) == 1 then
          serve_line(root, limit, milliseconds_now(''))
        end
      end
    end
    try('HDEL', limited, unpack(tags))
  end

  rules = {
    is_error = is_error,
    milliseconds_now = milliseconds_now,
    occupy = occupy,
    parts_of = parts_of,
    put_returned = put_returned,
    put_back = put_back,
    serve_line = serve_line,
    give_up = give_up,
  }
  return rules
end
