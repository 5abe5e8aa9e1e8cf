-- Settle tags: the message was acknowledged or rejected for good.
--
-- KEYS[1] scratch string: never exists; deleting it makes the first write one that a full Redis allows
-- KEYS[2] unacked hash: Kombu's records
-- KEYS[3] unacked_index zset: tag -> seconds
-- KEYS[4] holder hash: tag -> place
-- ARGV[1+] tags: one each; with \1, \2 or \3 before it: see _sorted.lua
-- Returns tags that this worker did not hold any more
-- Invariant: only records under the named tags are touched, so it can be repeated
call('DEL', KEYS[1])
local lost = settle(sub(KEYS[1], 1, -8), KEYS[2], KEYS[3], KEYS[4], ARGV)
save_all()
return lost
