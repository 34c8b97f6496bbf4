-- started -> finished for an upload job: its shard becomes the batch's (if no other is), or it is a twin.
--
-- a: job, execution, run, batch_id, extract_job, kept_seconds, shard_execution;
--    entry (JSON; "" if there is nothing to commit), num_samples, num_tokens, num_bytes
-- Returns "committed", "twin" or "lost".

local ledger = 'hiddenq:run:' .. a.run .. ':ledger'

local function verdict()
  return winner(a.run, a.batch_id) == a.shard_execution and 'committed' or 'twin'
end

if get(a.job, 'status') == 'finished' and get(a.job, 'execution') == a.execution then
  return verdict()
end
if not owns(a.job, a.execution) then
  return 'lost'
end
if a.entry ~= '' and redis.call('HSETNX', ledger, a.batch_id, a.entry) == 1 then
  local totals = 'hiddenq:run:' .. a.run .. ':totals'
  redis.call('HINCRBY', totals, 'num_batches', 1)
  redis.call('HINCRBY', totals, 'num_samples', a.num_samples)
  redis.call('HINCRBY', totals, 'num_tokens', a.num_tokens)
  redis.call('HINCRBY', totals, 'num_bytes', a.num_bytes)
end
count(a.job, a.execution, 'successful_job_count')
record(a.job, a.execution, SUCCESSFUL)
release(a.job, a.execution)
let_go(a.job)
complete(a.job, get(a.job, 'origin'), a.execution, a.kept_seconds)
local extract = get(a.extract_job, 'status')
if extract == 'finished' or extract == 'failed' then -- a dead letter whose batch is in after all is none
  complete(a.extract_job, get(a.extract_job, 'origin'), get(a.extract_job, 'execution') or '', a.kept_seconds)
end
return verdict()
