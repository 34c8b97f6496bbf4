-- A claim enters a stage; its lease is renewed. In Redis when the call returns: a batch that kills its process in this
-- stage is blamed for it.
--
-- a: job, execution, stage, lease_seconds
-- Returns 1, or 0 if the claim is lost.

if not owns(a.job, a.execution) then
  return 0
end
local member = a.job .. ':' .. a.execution
redis.call('ZADD', 'hiddenq:leases', precise(now + a.lease_seconds), member)
redis.call('ZADD', 'hiddenq:executions', precise(now), a.execution)
redis.call('HSET', 'rq:execution:' .. member, 'stage', a.stage, 'last_heartbeat', precise(now))
if a.stage == 'gpu' then
  redis.call('HSETNX', 'rq:execution:' .. member, 'gpu_at', precise(now))
end
return 1
