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
call('DEL', KEYS[1])
local root, tag, limit = sub(KEYS[1], 1, -8), ARGV[1], ARGV[2]
local to, duration = tonumber(ARGV[3]), tonumber(ARGV[4])
local permits, line, lines, rules = root .. 'permits:' .. limit, root .. 'line:' .. limit, root .. 'lines', root .. 'limits'

local function done(state, served, text)
  save_all()
  return {state, served or 0, text or ''}
end

local function not_held()
  settle(root, KEYS[2], KEYS[3], KEYS[4], {'\2' .. tag})
  return done(-1)
end

local place = call('HGET', KEYS[4], tag)
local number, suffix = string.match(place or '', '^%d+:(%d+):%d+:(.*)$')
if not number or not call('ZSCORE', KEYS[3], tag) then
  return not_held()
end

-- A key of a wrong type is told, not raised: its job would be asked for again for ever, in a slot.
local function wrong(name, answer)
  return type(answer) == 'table' and {-2, 0, name .. ': ' .. answer.err}
end

local failure = wrong(permits, try('ZCARD', permits)) or wrong(line, try('ZCARD', line))
if failure then
  return failure
end
local L = limits()
local now = L.milliseconds_now(ARGV[6])

local function has_permit(served)
  L.occupy(root, limit, number, duration, now)
  call('HSET', KEYS[5], tag, number .. ':' .. int(duration) .. ':' .. limit)
  call('PEXPIRE', KEYS[5], ARGV[5])
  return done(1, served)
end

call('ZREMRANGEBYSCORE', permits, '-inf', int(now))
local got, is_line = call('ZSCORE', permits, number), call('EXISTS', line) == 1
if not is_line and (got or call('ZCARD', permits) < to) then
  return has_permit()
end
local level, _, _, _, _, its_suffix = moving().sorted_place(place)
suffix = its_suffix or suffix
local base, served = moving().base_of(root, suffix), 0
if not base then
  return not_held()
end
local in_line = base .. 'in_line'
failure = wrong(in_line, try('ZCARD', in_line)) or wrong(lines, try('ZCARD', lines)) or wrong(rules, try('HLEN', rules))
if failure then
  return failure
end
if not got then
  local raw = raw_of(KEYS[2], KEYS[3], tag, suffix)
  if not raw then
    return not_held()
  end
  -- First of all, so that somebody looks at this line whatever happens.
  call('ZADD', lines, int(now), limit)
  call('HSET', rules, limit, int(to) .. ':' .. int(duration))
  call('ZADD', line, number, number .. suffix)
  served, got = L.serve_line(root, limit, now, number)
  if not got then
    call('ZADD', in_line, number, (level and 's' or 'p') .. sub(place, 1, -#suffix - 1) .. raw)
    settle(root, KEYS[2], KEYS[3], KEYS[4], {tag})
    return done(0, served)
  end
end
-- Whatever a call that failed halfway left of it there.
call('ZREM', line, number .. suffix)
call('ZREMRANGEBYSCORE', in_line, number, number)
return has_permit(served)
