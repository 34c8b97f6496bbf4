-- Ledger entries for shards that were found in the store: first one in wins, as ever.
--
-- a: run, entries (list of {batch_id, job, entry as JSON, num_samples, num_tokens, num_bytes})
-- Returns how many were new.

local adopted = 0
local totals = 'hiddenq:run:' .. a.run .. ':totals'
for _, found in ipairs(a.entries) do
  local batch_id, job, entry = found[1], found[2], found[3]
  if redis.call('HSETNX', 'hiddenq:run:' .. a.run .. ':ledger', batch_id, entry) == 1 then
    adopted = adopted + 1
    redis.call('HINCRBY', totals, 'num_batches', 1)
    redis.call('HINCRBY', totals, 'num_samples', found[4])
    redis.call('HINCRBY', totals, 'num_tokens', found[5])
    redis.call('HINCRBY', totals, 'num_bytes', found[6])
    if get(job, 'status') == 'failed' then
      complete(job, get(job, 'origin'), '', FINISHED_KEPT)
    end
  end
end
return adopted
