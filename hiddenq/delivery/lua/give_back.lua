-- started -> queued, scheduled or failed: an execution that ended without a result.
--
-- a: job, execution, charged, dead, delay_seconds, max_attempts, retry_delays, error, exc, reason, device
--    charged: it counts as an attempt, is recorded, and waits by retry_delays; otherwise it goes to the front at once,
--    or after delay_seconds. dead: no other attempt. exc: traceback, base64 of zlib. reason: what RQ's tools show.
-- Returns "retry", "dead" or "lost".

if not owns(a.job, a.execution) then
  return 'lost'
end
local queue = get(a.job, 'origin')
local attempts = tonumber(get(a.job, 'attempts') or '0')
if a.charged then
  attempts = redis.call('HINCRBY', 'rq:job:' .. a.job, 'attempts', 1)
end
local dead = a.dead or (a.charged and attempts >= a.max_attempts)
if a.charged or dead then
  count(a.job, a.execution, 'failed_job_count')
  record(a.job, a.execution, dead and FAILED or RETRIED,
    { number = math.max(attempts, 1), error = a.error, exc = a.exc, device = a.device })
end
release(a.job, a.execution)
if dead then
  bury(a.job, queue, a.reason)
  return 'dead'
end
local seconds = a.charged and a.retry_delays[math.min(attempts, #a.retry_delays)] or a.delay_seconds
if seconds > 0 then
  delay(a.job, queue, seconds)
else
  wait(a.job, queue, true)
end
return 'retry'
