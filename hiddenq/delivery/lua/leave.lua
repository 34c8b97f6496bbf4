-- A process ends: its claims go back uncharged, and it is no RQ worker any more.
--
-- a: worker, queues, entry, withdraw (it is not expected to come back)
-- Returns how many claims went back.

local key, num = 'rq:worker:' .. a.worker, 0
for _, member in ipairs(redis.call('SMEMBERS', key .. ':executions')) do
  local job, execution = string.match(member, '^(.*):(.*)$')
  if owns(job, execution) then
    local queue = get(job, 'origin')
    release(job, execution)
    wait(job, queue, true)
    num = num + 1
  end
end
redis.call('DEL', key .. ':executions')
redis.call('SREM', 'rq:workers', key)
for _, queue in ipairs(a.queues) do
  redis.call('SREM', 'rq:workers:' .. queue, key)
end
if redis.call('EXISTS', key) == 1 then
  redis.call('HSET', key, 'death', iso(now))
  redis.call('EXPIRE', key, 60)
end
if a.withdraw then
  redis.call('HDEL', 'hiddenq:workers', a.entry)
  redis.call('ZREM', 'hiddenq:workers:seen', a.entry)
end
return num
