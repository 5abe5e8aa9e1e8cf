-- Remove sorted jobs, a number of keys at a time.
--
-- KEYS[1] scratch string: never exists
-- KEYS[2] policy hash: stays
-- ARGV[1] count number of keys at most
-- Returns {number of jobs removed, 1 if there are more}
-- Invariant: jobs in flight stay in flight
local count_of = moving().count_of
call('DEL', KEYS[1])
local base = sub(KEYS[2], 1, -7)
local q = open(base)
if not q then
  return {0, 0}
end
local removed, keys = 0, {}
for l = 0, 9 do
  for _, name in ipairs({'index:', 'old:'}) do
    if #keys < tonumber(ARGV[1]) then
      local members = soft('ZRANGE', base .. name .. l, 0, tonumber(ARGV[1]) - 1) or {}
      for i = 1, #members do
        keys[#keys + 1] = {l, sub(members[i], 18), name, members[i]}
      end
    end
  end
end
if #keys == 0 and q.full > 0 then
  for _, entry in ipairs(call('SRANDMEMBER', base .. 'full', ARGV[1])) do
    keys[#keys + 1] = {tonumber(sub(entry, 1, 1)), sub(entry, 3), 'full', entry}
  end
end
for i = 1, #keys do
  local l, key, name, entry = unpack(keys[i])
  local number = count_of(q, l, key)
  local given_back = get(q, 'b') > 0 and soft('ZCARD', front_key(q, l, key)) or 0
  call('UNLINK', jobs_key(q, l, key), front_key(q, l, key))
  add(q, 't', -number)
  add(q, 'b', -given_back)
  removed = removed + number
  if name == 'full' then
    call('SREM', base .. 'full', entry)
    q.full = q.full - 1
  else
    call('ZREM', base .. name .. l, entry)
    soft('HDEL', base .. 'tags:' .. l, key)
    add_ready(q, l, -number)
  end
end
if #keys == 0 then
  for l = 0, 9 do
    put(q, V[l], 0)
    put(q, S[l], 0)
    add_ready(q, l, -get(q, R[l]))
  end
  put(q, 't', 0)
  put(q, 'b', 0)
end
save_all()
return {removed, #keys > 0 and 1 or 0}
