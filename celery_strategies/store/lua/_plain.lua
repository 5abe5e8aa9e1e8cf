-- What a script needs that meets no sorted job: see _sorted for the whole. It is much shorter, and Redis runs all of a
-- script's definitions in each call. Defines locals only.

-- Settle tags, none of a sorted queue. Returns those that were no longer held. Tags are minted once, so removing one that is
-- gone touches nobody else's record.
local function settle(_, unacked, unacked_index, holder, tags)
  local lost = {}
  if #tags == 0 then
    return lost
  end
  local scores = call('ZMSCORE', unacked_index, unpack(tags))
  for i = 1, #tags do
    if not scores[i] then
      lost[#lost + 1] = tags[i]
    end
  end
  call('HDEL', unacked, unpack(tags))
  call('ZREM', unacked_index, unpack(tags))
  call('HDEL', holder, unpack(tags))
  return lost
end

-- Nothing of a sorted queue was changed.
local function save_all()
end
