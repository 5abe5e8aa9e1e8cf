-- Have messages of a queue that stand in line for a permit wait with the given-back ones, for unsort.lua to find.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] in_line zset: number -> 's' or 'p', place, message
-- KEYS[3] returned zset: list * 2^47 + place -> list:place:deliveries:message
-- ARGV[1] count number of messages at most
-- Returns number of messages moved
-- Invariant: the returned set has a message before the line loses it; what is left of their lines is dropped when served
local parts_of, put_returned = limits().parts_of, limits().put_returned
call('DEL', KEYS[1])
local members, moved = call('ZRANGE', KEYS[2], 0, tonumber(ARGV[1]) - 1), 0
for i = 1, #members do
  local list, number, deliveries, raw = parts_of(members[i])
  if list and put_returned(KEYS[3], list, number, deliveries, raw) then
    call('ZREM', KEYS[2], members[i])
    moved = moved + 1
  end
end
return moved
