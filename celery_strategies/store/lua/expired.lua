-- List records that nobody refreshed within the visibility timeout.
--
-- KEYS[1] unacked_index zset: tag -> seconds
-- ARGV[1] timeout seconds
-- ARGV[2] count number
-- ARGV[3] now microseconds or ''
-- Returns {limit in seconds, tag, tag, ...}, oldest first
-- Invariant: reads only
local limit = format('%.6f', clock(ARGV[3]) / 1000000 - tonumber(ARGV[1]))
local tags = call('ZRANGEBYSCORE', KEYS[1], '-inf', limit, 'LIMIT', 0, ARGV[2])
table.insert(tags, 1, limit)
return tags
