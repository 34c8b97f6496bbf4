-- One heartbeat of a process: it is registered as an RQ worker, its leases are renewed, its report and its spool's
-- heartbeat are written.
--
-- a: worker, queues, fields (RQ's worker hash: a list of names and values), kept_seconds, entry, report, spool_id,
--    host, lease_seconds, claims (list of {job, execution})
-- Returns {Redis time, 1 if this host is drained else 0, epoch, execution whose lease is gone, ...}.

redis.call('SETNX', 'hiddenq:epoch', a.worker .. ' ' .. precise(now))
local answer = { precise(now), redis.call('SISMEMBER', 'hiddenq:drained', a.host), redis.call('GET', 'hiddenq:epoch') }
local key = 'rq:worker:' .. a.worker

for _, claim in ipairs(a.claims) do
  local job, execution = claim[1], claim[2]
  local member = job .. ':' .. execution
  if redis.call('ZSCORE', 'hiddenq:leases', member) then
    redis.call('ZADD', 'hiddenq:leases', precise(now + a.lease_seconds), member)
    redis.call('ZADD', 'hiddenq:executions', precise(now), execution)
    redis.call('HSET', 'rq:execution:' .. member, 'last_heartbeat', precise(now))
    redis.call('EXPIRE', 'rq:execution:' .. member, EXECUTION_KEPT)
    redis.call('EXPIRE', 'rq:executions:' .. job, EXECUTION_KEPT)
    redis.call('HSET', 'rq:job:' .. job, 'last_heartbeat', iso(now))
  else
    answer[#answer + 1] = execution
  end
end
redis.call('HSET', key, 'last_heartbeat', iso(now), unpack(a.fields))
redis.call('HSETNX', key, 'birth', iso(now))
redis.call('EXPIRE', key, a.kept_seconds)
redis.call('EXPIRE', key .. ':executions', EXECUTION_KEPT)
redis.call('SADD', 'rq:workers', key)
for _, queue in ipairs(a.queues) do
  redis.call('SADD', 'rq:workers:' .. queue, key)
end
redis.call('HSET', 'hiddenq:workers', a.entry, a.report)
redis.call('ZADD', 'hiddenq:workers:seen', precise(now), a.entry)
if a.spool_id ~= '' then
  redis.call('ZADD', 'hiddenq:spools', precise(now), a.spool_id)
  redis.call('HSET', 'hiddenq:spool:' .. a.spool_id, 'host', a.host)
end
return answer
