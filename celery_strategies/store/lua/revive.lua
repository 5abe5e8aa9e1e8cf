-- Put a dead message back at the tail of its level, as if it had just been published.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] dead stream: reason, list, key, weight, worker, message
-- KEYS[3+] inbox lists 0 to 9
-- ARGV[1] id text of the entry
-- Returns 1 if it was put back, 0 if there is no such entry
-- Invariant: the list has the message before the stream loses it
call('DEL', KEYS[1])
local entry = call('XRANGE', KEYS[2], ARGV[1], ARGV[1])[1]
if not entry then
  return 0
end
local fields = {}
for i = 1, #entry[2], 2 do
  fields[entry[2][i]] = entry[2][i + 1]
end
call('LPUSH', KEYS[3 + tonumber(fields.list)], fields.message)
call('XDEL', KEYS[2], ARGV[1])
return 1
