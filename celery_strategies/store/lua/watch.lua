-- Join the idle workers of each source: a few watch it, the rest park on their own wake key.
--
-- KEYS[1] wake string: this worker's wake key, the member in both sets
-- KEYS[2+] sources: per source watchers zset, parked zset
-- ARGV[1] watchers number of workers that watch one source
-- ARGV[2] stale milliseconds after which an idle worker that was not seen is forgotten
-- ARGV[3] now microseconds or ''
-- Returns role per source: 1 watch, 0 parked
-- Invariant: a worker is in one of the two sets, never in both
local now = clock(ARGV[3]) / 1000
local me, roles = KEYS[1], {}
for i = 1, (#KEYS - 1) / 2 do
  local watchers, parked = KEYS[2 * i], KEYS[2 * i + 1]
  call('ZREMRANGEBYSCORE', watchers, '-inf', int(now - ARGV[2]))
  if call('ZSCORE', watchers, me) or call('ZCARD', watchers) < tonumber(ARGV[1]) then
    call('ZREM', parked, me)
    call('ZADD', watchers, int(now), me)
    call('PEXPIRE', watchers, ARGV[2])
    roles[i] = 1
  else
    call('ZREMRANGEBYSCORE', parked, '-inf', int(now - ARGV[2]))
    call('ZADD', parked, int(now), me)
    call('PEXPIRE', parked, ARGV[2])
    roles[i] = 0
  end
end
return roles
