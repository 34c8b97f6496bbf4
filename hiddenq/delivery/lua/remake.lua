-- An upload job ends without a commit, and its batch goes back to the GPU: the file is gone or damaged, or its whole
-- spool is.
--
-- a: job, run, batch_id, extract_job, extract_queue, max_remakes, error, reason, exc;
--    execution (the uploader's), or spool_id and spool_dead_seconds: nobody holds it and the spool has no heartbeat
-- ARGV[2...]: the extract job's hash, in case Redis has it no more
-- Returns "remade", "dead" (made again too often), "held" (another execution of the batch is on its way), "committed"
-- or "lost".

if a.execution then
  if not owns(a.job, a.execution) then
    return 'lost'
  end
else
  local beat = tonumber(redis.call('ZSCORE', 'hiddenq:spools', a.spool_id) or '0')
  local status = get(a.job, 'status')
  if now - beat < a.spool_dead_seconds or (status ~= 'queued' and status ~= 'scheduled') then
    return 'lost'
  end
end

local queue = get(a.job, 'origin')
local execution = a.execution or ''
local by = redis.call('HMGET', 'rq:execution:' .. a.job .. ':' .. execution, 'worker_name', 'host')
if a.execution then
  release(a.job, a.execution)
else
  redis.call('LREM', 'rq:queue:' .. queue, 1, a.job)
end
let_go(a.job)
erase(a.job, queue)

if is_committed(a.run, a.batch_id) then
  return 'committed'
end
local upload = get(a.extract_job, 'upload')
if is_live(a.extract_job) or (upload and upload ~= a.job and is_live(upload)) then
  return 'held'
end
if redis.call('EXISTS', 'rq:job:' .. a.extract_job) == 0 then
  redis.call('HSET', 'rq:job:' .. a.extract_job, 'created_at', iso(now), unpack(ARGV, 2))
end
local remakes = redis.call('HINCRBY', 'rq:job:' .. a.extract_job, 'remakes', 1)
local dead = remakes > a.max_remakes
record(a.extract_job, execution, dead and FAILED or RETRIED,
  { number = remakes, error = a.error, exc = a.exc, worker = by[1], host = by[2] })
if dead then
  bury(a.extract_job, a.extract_queue, a.reason)
  return 'dead'
end
wait(a.extract_job, a.extract_queue, true)
return 'remade'
