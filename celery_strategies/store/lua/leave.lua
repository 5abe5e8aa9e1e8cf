-- Close a session: forget the holder if it holds nothing.
--
-- KEYS[1] holder hash: tag -> place, '' -> session
-- Returns number of messages still held
-- Invariant: a holder with messages stays
local held = call('HLEN', KEYS[1]) - call('HEXISTS', KEYS[1], '')
if held == 0 then
  call('DEL', KEYS[1])
end
return held
