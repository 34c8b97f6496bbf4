-- queued -> started, for up to #executions jobs of one queue.
--
-- a: queue, worker, host, lease_seconds, run ("" for an upload queue), max_data_bytes, executions
-- Returns {job, execution, data, attempts, ...}, four values a claim; data is "" if it is over max_data_bytes.
--
-- Ids of deleted jobs and repeated ids are dropped; a batch that is committed already is finished without being run.
-- A claim whose reply was lost is found again by its executions. A cancelled run gives out nothing.

local claimed, free, mine = {}, {}, {}

local function hand_out(job, execution)
  local key = 'rq:job:' .. job
  local data = redis.call('HSTRLEN', key, 'data') <= a.max_data_bytes and redis.call('HGET', key, 'data') or ''
  for _, value in ipairs({ job, execution, data, get(job, 'attempts') or '0' }) do
    claimed[#claimed + 1] = value
  end
end

local function start(job, execution)
  local member = job .. ':' .. execution
  redis.call('HSET', 'rq:job:' .. job, 'status', 'started', 'started_at', iso(now), 'last_heartbeat', iso(now),
    'worker_name', a.worker, 'execution', execution)
  redis.call('PERSIST', 'rq:job:' .. job)
  if a.run ~= '' then
    redis.call('ZREM', 'hiddenq:run:' .. a.run .. ':dead', job) -- put back by RQ's own tools
  end
  redis.call('ZADD', 'rq:wip:' .. a.queue, INF, member)
  redis.call('HSET', 'rq:execution:' .. member, 'id', execution, 'job_id', job, 'created_at', precise(now),
    'last_heartbeat', precise(now), 'worker_name', a.worker, 'queue', a.queue, 'host', a.host, 'stage', 'claimed',
    'lease_seconds', a.lease_seconds)
  redis.call('EXPIRE', 'rq:execution:' .. member, EXECUTION_KEPT)
  redis.call('ZADD', 'rq:executions:' .. job, INF, execution)
  redis.call('EXPIRE', 'rq:executions:' .. job, EXECUTION_KEPT)
  redis.call('SADD', 'rq:worker:' .. a.worker .. ':executions', member)
  redis.call('EXPIRE', 'rq:worker:' .. a.worker .. ':executions', EXECUTION_KEPT)
  redis.call('ZADD', 'hiddenq:leases', precise(now + a.lease_seconds), member)
  redis.call('ZADD', 'hiddenq:executions', precise(now), execution)
end

for _, member in ipairs(redis.call('SMEMBERS', 'rq:worker:' .. a.worker .. ':executions')) do
  local job, execution = string.match(member, '^(.*):(.*)$')
  mine[execution] = job
end
for _, execution in ipairs(a.executions) do
  if mine[execution] and owns(mine[execution], execution) then
    hand_out(mine[execution], execution)
  else
    free[#free + 1] = execution
  end
end

if a.run ~= '' and redis.call('HGET', 'hiddenq:run:' .. a.run, 'state') == 'cancelled' then
  return claimed
end

local looks = 0
while #free > 0 and looks < 1000 do
  looks = looks + 1
  local job = redis.call('LPOP', 'rq:queue:' .. a.queue)
  if not job then
    break
  end
  if get(job, 'status') == 'queued' and get(job, 'origin') == a.queue then
    if a.run ~= '' and is_committed(a.run, get(job, 'batch_id') or '') then
      complete(job, a.queue, '', 3600)
    else
      local execution = table.remove(free)
      start(job, execution)
      hand_out(job, execution)
    end
  end
end
return claimed
