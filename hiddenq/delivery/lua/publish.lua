-- started -> finished for an extract job, and its upload job -> queued: one step.
--
-- a: job, execution, run, batch_id, upload_job, upload_queue, spool_id, file_name, host
-- ARGV[2...]: the upload job's hash, names and values
-- Returns "done" (again, if the reply was lost) or "lost".

local queue = get(a.job, 'origin')
if redis.call('EXISTS', 'rq:job:' .. a.upload_job) == 1 or winner(a.run, a.batch_id) == a.execution then
  return 'done'
end
if not owns(a.job, a.execution) then
  return 'lost'
end
local gpu_at = redis.call('HGET', 'rq:execution:' .. a.job .. ':' .. a.execution, 'gpu_at')
if gpu_at then
  redis.call('LPUSH', 'hiddenq:run:' .. a.run .. ':seconds', string.format('%.3f', math.max(now - tonumber(gpu_at), 0)))
  redis.call('LTRIM', 'hiddenq:run:' .. a.run .. ':seconds', 0, 499)
end
count(a.job, a.execution, 'successful_job_count')
record(a.job, a.execution, SUCCESSFUL)
release(a.job, a.execution)
complete(a.job, queue, a.execution, nil)
redis.call('HSET', 'rq:job:' .. a.job, 'upload', a.upload_job)
-- As `wait` does it, for a job that was nowhere before.
redis.call('HSET', 'rq:job:' .. a.upload_job, 'created_at', iso(now), 'enqueued_at', iso(now), unpack(ARGV, 2))
redis.call('SADD', 'rq:queues', 'rq:queue:' .. a.upload_queue)
redis.call('RPUSH', 'rq:queue:' .. a.upload_queue, a.upload_job)
redis.call('HSET', 'hiddenq:spool:' .. a.spool_id .. ':files', a.file_name, a.upload_job)
redis.call('ZADD', 'hiddenq:spools', precise(now), a.spool_id)
redis.call('HSET', 'hiddenq:spool:' .. a.spool_id, 'host', a.host)
return 'done'
