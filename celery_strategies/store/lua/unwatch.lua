-- Leave the idle workers of some sources, handing each watch on.
--
-- KEYS[1] wake string: this worker's wake key
-- KEYS[2+] sources: per source watchers zset, parked zset
-- Returns number of workers woken in its place
-- Invariant: a source that had a watcher and has parked workers is not left without one
local me = KEYS[1]
local woken = call('DEL', me)
local roused = 0
for i = 1, (#KEYS - 1) / 2 do
  local watchers, parked = KEYS[2 * i], KEYS[2 * i + 1]
  call('ZREM', parked, me)
  local watched = call('ZREM', watchers, me) == 1
  if woken == 1 or (watched and call('EXISTS', watchers) == 0) then
    roused = roused + wake_parked(parked, 1)
  end
end
return roused
