-- Give a held message a permit of the limit of its task, or have it wait in line for one.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] unacked hash: Kombu's records
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4] holder hash: tag -> place
-- KEYS[5] limited hash: tag -> 'number:duration:limit'
-- ARGV[1] tag text
-- ARGV[2] limit text: 'task or group:key'
-- ARGV[3] to number of permits
-- ARGV[4] duration milliseconds that a permit outlives its last renewal
-- ARGV[5] ttl milliseconds of `limited`
-- ARGV[6] now microseconds or ''
-- Returns {1 if it has a permit, 0 if it waits in line, -1 if this worker did not hold it, -2 if a key of the limit cannot
--   be read; number of others that got a permit; error text}
-- Invariant: the line has the message before its record goes; a message that has a permit already keeps that one
local sorted_place, base_of = moving().sorted_place, moving().base_of
local L = limits()
local is_error, milliseconds_now, serve_line, occupy = L.is_error, L.milliseconds_now, L.serve_line, L.occupy
call('DEL', KEYS[1])
local root, tag, limit = sub(KEYS[1], 1, -8), ARGV[1], ARGV[2]
local to, duration = tonumber(ARGV[3]), tonumber(ARGV[4])

local function not_held()
  settle(root, KEYS[2], KEYS[3], KEYS[4], {'\2' .. tag})
  save_all()
  return {-1, 0, ''}
end

local place = call('HGET', KEYS[4], tag)
if not place or not call('ZSCORE', KEYS[3], tag) then
  return not_held()
end
local level, _, _, _, _, suffix = sorted_place(place)
suffix = suffix or string.match(place, '^%d+:%d+:%d+:(.*)$')
local number, base = string.match(place, '^%d+:(%d+):'), base_of(root, suffix)
local permits, line, in_line = root .. 'permits:' .. limit, root .. 'line:' .. limit, base .. 'in_line'
for _, name in ipairs({permits, line, in_line, root .. 'lines', root .. 'limits'}) do
  local answer = name == root .. 'limits' and try('HLEN', name) or try('ZCARD', name)
  if is_error(answer) then
    return {-2, 0, name .. ': ' .. answer.err}
  end
end
local now, served = milliseconds_now(ARGV[6]), 0
call('ZREMRANGEBYSCORE', permits, '-inf', int(now))
local got, is_line = call('ZSCORE', permits, number), call('EXISTS', line) == 1
local raw = nil
if not got and not is_line and call('ZCARD', permits) < to then
  got = true
elseif not got then
  raw = raw_of(KEYS[2], KEYS[3], tag, suffix)
  if not raw then
    return not_held()
  end
  -- First of all, so that somebody looks at this line whatever happens.
  call('ZADD', root .. 'lines', int(now), limit)
  call('HSET', root .. 'limits', limit, int(to) .. ':' .. int(duration))
  call('ZADD', line, number, number .. suffix)
  served, got = serve_line(root, limit, now, number)
end
if got then
  occupy(root, limit, number, duration, now)
  call('HSET', KEYS[5], tag, number .. ':' .. int(duration) .. ':' .. limit)
  call('PEXPIRE', KEYS[5], ARGV[5])
  if is_line then
    -- Whatever a call that failed halfway left of it there.
    call('ZREM', line, number .. suffix)
    call('ZREMRANGEBYSCORE', in_line, number, number)
  end
  save_all()
  return {1, served, ''}
end
call('ZADD', in_line, number, (level and 's' or 'p') .. sub(place, 1, -#suffix - 1) .. raw)
settle(root, KEYS[2], KEYS[3], KEYS[4], {tag})
save_all()
return {0, served, ''}
