-- Ledger entries of shards that are gone from the store -> no entry: their batches are to be made again.
--
-- a: run, entries (list of {batch_id, entry as JSON, num_samples, num_tokens, num_bytes})
-- An entry that is no longer the one named is left alone. Returns how many were removed.

local removed = 0
local ledger, totals = 'hiddenq:run:' .. a.run .. ':ledger', 'hiddenq:run:' .. a.run .. ':totals'
for _, found in ipairs(a.entries) do
  if redis.call('HGET', ledger, found[1]) == found[2] then
    removed = removed + redis.call('HDEL', ledger, found[1])
    redis.call('HINCRBY', totals, 'num_batches', -1)
    redis.call('HINCRBY', totals, 'num_samples', -found[3])
    redis.call('HINCRBY', totals, 'num_tokens', -found[4])
    redis.call('HINCRBY', totals, 'num_bytes', -found[5])
  end
end
return removed
