-- Look for the message of a task in stretches of lists and sorted sets, the oldest first.
--
-- KEYS[1+] places list or zset of messages, one for each stretch
-- ARGV[1] id text: as it stands in JSON
-- ARGV[2] step number of messages that are read at once
-- ARGV[3] bytes number after which no more are read
-- ARGV[4+] stretches: for each key 'l', 'z', or 't' for a list that is read from its oldest end, one by one; index of the first
--   message, from that end; number of messages
-- Returns {key (1-based, 0 = not found), index, length of that key, element, stretches done, messages done of the next one, messages
--   read, bytes read, an id that begins like it or ''}
-- Invariant: reads only, and no more than a step beyond the bytes
local id, step, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local match = string.match
local near, messages, bytes = '', 0, 0

-- Whether it is the message's own id; children and siblings of the task name it, too.
local function is_own(text)
  local from = 1
  while true do
    local start, stop = find(text, id, from, true)
    if not start then
      return false
    end
    local before = sub(text, math.max(1, start - 32), start - 1)
    if match(before, '"id"%s*:%s*"$') or match(before, '"correlation_id"%s*:%s*"$') then
      if sub(text, stop + 1, stop + 1) == '"' then
        return true
      elseif near == '' then
        near = match(text, '^[^"]*', start)
      end
    end
    from = stop + 1
  end
end

-- The messages of a list that stand from `first` on from its oldest end.
local function tail(name, first, count)
  local found = {}
  for i = 1, count do
    found[i] = soft('LINDEX', name, -first - i) or nil
  end
  return found
end

for k = 1, #KEYS do
  local name, kind = KEYS[k], ARGV[3 * k + 1]
  local first, count = tonumber(ARGV[3 * k + 2]), tonumber(ARGV[3 * k + 3])
  local done = 0
  while done < count do
    if bytes >= limit then
      return {0, 0, 0, '', k - 1, done, messages, bytes, near}
    end
    local from, number = first + done, math.min(step, count - done)
    -- A key of a wrong type has nothing of ours.
    local found = kind == 't' and tail(name, from, number)
      or soft(kind == 'z' and 'ZRANGE' or 'LRANGE', name, from, from + number - 1) or {}
    for i = 1, #found do
      bytes = bytes + #found[i]
      if is_own(found[i]) then
        local length = call(kind == 'z' and 'ZCARD' or 'LLEN', name)
        local index = from + i - 1
        return {k, kind == 't' and length - 1 - index or index, length, found[i], k - 1, done, messages + i, bytes, near}
      end
    end
    messages, done = messages + #found, done + number
    if #found < number then
      break
    end
  end
end
return {0, 0, 0, '', #KEYS, 0, messages, bytes, near}
