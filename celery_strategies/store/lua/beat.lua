-- Say that this worker lives, and name those who seem not to.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] alive zset: worker -> milliseconds of its last beat
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4] holder hash: tag -> place
-- KEYS[5] entry hash: what the worker says of itself
-- KEYS[6] leases set: bases of the queues whose lease it has
-- KEYS[7+] consumers zset of each queue that it reads: worker -> consumer priority
-- ARGV[1] worker id
-- ARGV[2] quiet milliseconds after which a worker is named although its session is there
-- ARGV[3] ttl milliseconds of the holder
-- ARGV[4] entry_ttl milliseconds of the entry
-- ARGV[5] sessions text: what the names of sessions' channels begin with; '' = do not look
-- ARGV[6] lease_ttl milliseconds; below 0: the same, but its leases are left as they are
-- ARGV[7] priority number: its own consumer priority
-- ARGV[8] now microseconds or ''
-- ARGV[9+] tags: one for each message held, whose time stamps are renewed
-- Returns {now in milliseconds, entry (1 = it is there), outranked ('1' for each queue that a live worker of higher priority
--   reads, else '0'), worker, last beat, gone (1 = it has no session), ...}: up to 32 workers
-- Invariant: a tag that is gone is not brought back
call('DEL', KEYS[1])
local now = clock(ARGV[8])
local ms = math.floor(now / 1000)
call('ZADD', KEYS[2], int(ms), ARGV[1])
call('PEXPIRE', KEYS[4], ARGV[3])
local entry = call('PEXPIRE', KEYS[5], ARGV[4])
local seconds, scores = format('%.6f', now / 1000000), {}
for i = 9, #ARGV do
  scores[#scores + 1], scores[#scores + 2] = seconds, ARGV[i]
end
if #scores > 0 then
  call('ZADD', KEYS[3], 'XX', unpack(scores))
end
local reads = {}
for i = 7, #KEYS do
  reads[KEYS[i]] = true
end
for _, base in ipairs(call('SRANDMEMBER', KEYS[6], 1000)) do
  -- Only ours: who was silent for long may have lost it.
  local leader, failure = soft('HGET', base .. 'lease', 'worker')
  if leader == ARGV[1] then
    if tonumber(ARGV[6]) > 0 and not reads[base .. 'consumers'] and not call('HGET', base .. 'lease', 'tag') then
      -- It was told to stop reading that one.
      call('HDEL', base .. 'lease', 'worker', 'until', 'late')
      call('SET', base .. 'free', '1', 'PX', 60000)
      call('SREM', KEYS[6], base)
    elseif tonumber(ARGV[6]) > 0 then
      call('HSET', base .. 'lease', 'until', int(ms + ARGV[6]))
      call('HDEL', base .. 'lease', 'late')
    end
  elseif not failure then
    call('SREM', KEYS[6], base)
  end
end
local outranked = {}
for i = 7, #KEYS do
  local flag, found = '0', soft('ZREVRANGEBYSCORE', KEYS[i], '+inf', '(' .. ARGV[7], 'WITHSCORES', 'LIMIT', 0, 20) or {}
  for j = 1, #found, 2 do
    local beat = call('ZSCORE', KEYS[2], found[j])
    if not beat then
      -- Long gone: its name must not stand before those who live.
      call('ZREM', KEYS[i], found[j])
    elseif ms - tonumber(beat) < math.abs(tonumber(ARGV[6])) then
      flag = '1'
    end
  end
  outranked[i - 6] = flag
end
local answer = {ms, entry, table.concat(outranked)}
local function name(worker, beat, gone)
  if #answer < 99 then
    local m = #answer
    answer[m + 1], answer[m + 2], answer[m + 3] = worker, beat, gone
  end
end
local quiet = ms - ARGV[2]
if ARGV[5] == '' then
  local found = call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. int(quiet), 'WITHSCORES', 'LIMIT', 0, 32)
  for i = 1, #found, 2 do
    name(found[i], found[i + 1], 0)
  end
  return answer
end
local entries = sub(KEYS[5], 1, #KEYS[5] - #ARGV[1])
-- In chunks: a script's unpack is bounded. Sessions are cheap to ask for, clients are not.
local from = 0
repeat
  local found = call('ZRANGE', KEYS[2], from, from + 499, 'WITHSCORES')
  local channels = {}
  for i = 1, #found, 2 do
    channels[#channels + 1] = ARGV[5] .. found[i]
  end
  local sessions = #channels > 0 and call('PUBSUB', 'NUMSUB', unpack(channels)) or {}
  for i = 1, #found, 2 do
    -- Some clients cannot have a session; what they say of themselves says so.
    local gone = tonumber(sessions[i + 1]) == 0 and call('HGET', entries .. found[i], 'session') == '1'
    if (gone or tonumber(found[i + 1]) < quiet) and found[i] ~= ARGV[1] then
      name(found[i], found[i + 1], gone and 1 or 0)
    end
  end
  from = from + 500
until #found < 1000
return answer
