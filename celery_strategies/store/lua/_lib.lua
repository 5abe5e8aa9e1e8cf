-- Shared helpers, prepended to every script by the loader (store/scripts.py).
-- Defines locals only and touches no key by itself.
local call, try = redis.call, redis.pcall
local sub, find, gsub, format, byte = string.sub, string.find, string.gsub, string.format, string.byte

-- Width of one list in the scores of a returned set: list * BAND + place.
-- Ten lists stay below 2^51, so every score is an exact double.
local BAND = 140737488355328

local function int(number)
  return format('%.0f', number)
end

-- Call a command on a key that somebody may have overwritten: one of a wrong type has nothing of ours. Returns nil and the
-- error then; any other error ends the script as ever.
local function soft(...)
  local fine, answer = pcall(call, ...)
  if fine then
    return answer
  end
  local text = type(answer) == 'table' and answer.err or tostring(answer)
  if find(text, 'WRONGTYPE', 1, true) then
    return nil, text
  end
  error(answer, 0)
end

-- Server time in microseconds; a test may inject its own.
local function clock(injected)
  if injected ~= '' then
    return tonumber(injected)
  end
  local t = call('TIME')
  return t[1] * 1000000 + t[2]
end

local function is_object(value, name, text)
  if type(value) ~= 'table' or #value > 0 then
    return false
  end
  -- cjson decodes {} and [] alike.
  return next(value) ~= nil or not find(text, '"' .. name .. '"%s*:%s*%[')
end

-- Why a raw message cannot become an unacked record, or nil and the message without its body. One record that a stock
-- worker cannot decode makes its whole recovery fail, hence the check before the write.
-- A leading string body (Kombu's own order) is skipped, not decoded: that is where the bytes are.
-- What only a strict parser refuses (a control character in a string, a leading zero) passes here,
-- as finding it would cost more than the rest of a take; the reader sets that aside.
local function problem(raw)
  -- To cjson a NUL is the end, whatever follows.
  if find(raw, '\0', 1, true) then
    return 'not JSON'
  end
  local text = raw
  local _, quote = find(raw, '^%s*{%s*"body"%s*:%s*"')
  if quote then
    local close = find(raw, '"', quote + 1, true)
    local escape = find(raw, '\\', quote + 1, true)
    if close and (not escape or escape > close) then
      local _, comma = find(raw, '^%s*,', close + 1)
      if comma then
        text = '{' .. sub(raw, comma + 1)
      end
    end
  end
  local ok, message = pcall(cjson.decode, text)
  if not ok and find(text, '\\u[dD]') then
    -- A lone surrogate is JSON, but cjson refuses it. Nothing below looks at one.
    text = gsub(gsub(text, '\\\\', ''), '\\u[dD][89a-fA-F]%x%x', '')
    ok, message = pcall(cjson.decode, text)
  end
  if not ok then
    return 'not JSON'
  end
  if type(message) ~= 'table' then
    return 'not a JSON object'
  end
  if not is_object(message.headers, 'headers', text) then
    return 'headers are not an object'
  end
  local properties = message.properties
  if not is_object(properties, 'properties', text) then
    return 'properties are not an object'
  end
  if not is_object(properties.delivery_info, 'delivery_info', text) then
    return 'delivery_info is not an object'
  end
  local tag = properties.delivery_tag
  if type(tag) ~= 'string' and type(tag) ~= 'number' then
    return 'no delivery_tag'
  end
  local priority = properties.priority
  if priority == math.huge or priority == -math.huge then
    -- Kombu drops a message with such a priority when it restores it.
    return 'priority is not finite'
  end
  return nil, message
end

-- The raw message inside a tag's unacked record '[raw,"","queue"]'; nil if there is no such record.
-- Reads all that settle() will write, so that a key of a wrong type stops a script before it wrote.
local function raw_of(unacked, unacked_index, tag, suffix)
  local record = call('HGET', unacked, tag)
  call('ZSCORE', unacked_index, tag)
  if record and sub(record, 1, 1) == '[' and sub(record, -#suffix) == suffix then
    return sub(record, 2, #record - #suffix)
  end
  return nil
end

-- Wake up to `count` parked workers. Members of a parked set are the workers' own wake keys;
-- writing one invalidates what its worker tracks. An error (a wrong type, no permission) costs the
-- wake, not the call.
local function wake_parked(parked, count)
  local popped = try('ZPOPMAX', parked, count)
  for i = 1, #popped, 2 do
    try('SET', popped[i], '1', 'PX', 30000)
  end
  return #popped / 2
end
