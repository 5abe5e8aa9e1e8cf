-- Say that this worker lives, and name those who seem not to.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] alive zset: worker -> milliseconds of its last beat
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4] holder hash: tag -> place
-- KEYS[5] entry hash: what the worker says of itself
-- ARGV[1] worker id
-- ARGV[2] quiet milliseconds after which a worker is named although its session is there
-- ARGV[3] ttl milliseconds of the holder
-- ARGV[4] entry_ttl milliseconds of the entry
-- ARGV[5] sessions text: what the names of sessions' channels begin with; '' = do not look
-- ARGV[6] now microseconds or ''
-- ARGV[7+] tags: one for each message held, whose time stamps are renewed
-- Returns {now in milliseconds, entry (1 = it is there), worker, last beat, gone (1 = it has no session), ...}: up to 32 workers
-- Invariant: a tag that is gone is not brought back
call('DEL', KEYS[1])
local now = clock(ARGV[6])
local ms = math.floor(now / 1000)
call('ZADD', KEYS[2], int(ms), ARGV[1])
call('PEXPIRE', KEYS[4], ARGV[3])
local entry = call('PEXPIRE', KEYS[5], ARGV[4])
local seconds, scores = format('%.6f', now / 1000000), {}
for i = 7, #ARGV do
  scores[#scores + 1], scores[#scores + 2] = seconds, ARGV[i]
end
if #scores > 0 then
  call('ZADD', KEYS[3], 'XX', unpack(scores))
end
local answer = {ms, entry}
local function name(worker, beat, gone)
  if #answer < 98 then
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
