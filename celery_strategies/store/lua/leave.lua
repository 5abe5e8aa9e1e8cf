-- Close a session: forget the worker if it holds nothing.
--
-- KEYS[1] holder hash: tag -> place, '' -> session
-- KEYS[2] alive zset: worker -> milliseconds of its last beat
-- KEYS[3] entry hash: what the worker says of itself
-- ARGV[1] worker id
-- Returns number of messages still held
-- Invariant: a holder with messages stays, and so does its name, for others to put them back
local held = call('HLEN', KEYS[1]) - call('HEXISTS', KEYS[1], '')
if held == 0 then
  local root = sub(KEYS[2], 1, -6)
  give_up_leases(root, ARGV[1])
  forget_consumer(root, KEYS[3], ARGV[1])
  call('DEL', KEYS[1], KEYS[3])
  call('ZREM', KEYS[2], ARGV[1])
end
return held
