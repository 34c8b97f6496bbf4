-- queued -> started, for up to #executions jobs, of several queues in order.
--
-- a: queues (list of {queue, run; "" for an upload queue}), worker, host, lease_seconds, deaths_until_alone,
--    max_data_bytes, executions
-- Returns {job, queue, execution, data, attempts, ...}, five values a claim; data is "" if it is over max_data_bytes.
--
-- Ids of deleted jobs and repeated ids are dropped; a batch that is committed already is finished without being run.
-- A claim whose reply was lost is found again by its executions. A cancelled run gives out nothing.
--
-- A job whose processes died again and again, where none could be blamed, is given to a worker that holds nothing,
-- which gets nothing else beside it: so the next death is its own. Until then it waits at the front, and this worker
-- with it.

local claimed, free, mine = {}, {}, {}
local num_held, holds_alone = 0, false

local function hand_out(job, queue, execution)
  local key = 'rq:job:' .. job
  local data = redis.call('HSTRLEN', key, 'data') <= a.max_data_bytes and redis.call('HGET', key, 'data') or ''
  for _, value in ipairs({ job, queue, execution, data, get(job, 'attempts') or '0' }) do
    claimed[#claimed + 1] = value
  end
end

local function start(job, queue, run, execution, alone)
  local member = job .. ':' .. execution
  redis.call('HSET', 'rq:job:' .. job, 'status', 'started', 'started_at', iso(now), 'last_heartbeat', iso(now),
    'worker_name', a.worker, 'execution', execution)
  redis.call('PERSIST', 'rq:job:' .. job)
  if run ~= '' then
    redis.call('ZREM', 'hiddenq:run:' .. run .. ':dead', job) -- put back by RQ's own tools
    redis.call('ZREM', 'hiddenq:run:' .. run .. ':foreign', job)
  end
  redis.call('ZADD', 'rq:wip:' .. queue, INF, member)
  redis.call('HSET', 'rq:execution:' .. member, 'id', execution, 'job_id', job, 'created_at', precise(now),
    'last_heartbeat', precise(now), 'worker_name', a.worker, 'queue', queue, 'host', a.host, 'stage', 'claimed',
    'lease_seconds', a.lease_seconds)
  if alone then
    redis.call('HSET', 'rq:execution:' .. member, 'alone', '1')
  end
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
  num_held = num_held + 1
  holds_alone = holds_alone or redis.call('HEXISTS', 'rq:execution:' .. member, 'alone') == 1
end
for _, execution in ipairs(a.executions) do
  if mine[execution] and owns(mine[execution], execution) then
    hand_out(mine[execution], get(mine[execution], 'origin'), execution)
  else
    free[#free + 1] = execution
  end
end

local looks = 0

-- Claims from one queue; true if the worker has to look no further.
local function take(queue, run)
  if run ~= '' and redis.call('HGET', 'hiddenq:run:' .. run, 'state') == 'cancelled' then
    return false
  end
  while #free > 0 and looks < 1000 do
    looks = looks + 1
    local job = redis.call('LPOP', 'rq:queue:' .. queue)
    if not job then
      return false
    end
    local found = redis.call('HMGET', 'rq:job:' .. job, 'status', 'origin', 'batch_id', 'deaths')
    if found[1] == 'queued' and found[2] == queue then
      local alone = tonumber(found[4] or '0') >= a.deaths_until_alone
      if run ~= '' and is_committed(run, found[3] or '') then
        complete(job, queue, '', FINISHED_KEPT)
      elseif alone and num_held > 0 then
        redis.call('LPUSH', 'rq:queue:' .. queue, job)
        return true
      else
        local execution = table.remove(free)
        start(job, queue, run, execution, alone)
        hand_out(job, queue, execution)
        num_held = num_held + 1
        if alone then
          return true
        end
      end
    end
  end
  return #free == 0
end

if not holds_alone then
  for _, entry in ipairs(a.queues) do
    if take(entry[1], entry[2]) then
      break
    end
  end
end
return claimed
