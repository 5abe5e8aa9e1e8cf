-- Say when the first delayed message of each source is due.
--
-- KEYS[1+] delayed zset of each source
-- ARGV[1] now microseconds or ''
-- Returns {wait, wait, ...} milliseconds, 0 = due, -1 = there is none
-- Invariant: reads only
local now, waits = clock(ARGV[1]) / 1000, {}
for i = 1, #KEYS do
  local first = try('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')
  waits[i] = first[2] and math.ceil(math.max(0, tonumber(first[2]) - now)) or -1
end
return waits
