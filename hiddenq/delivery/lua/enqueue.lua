-- Extract jobs -> queued, unless the batch is committed or something live holds it. Running it twice adds nothing.
--
-- a: run, queue, fields (names and values that all jobs share), jobs (list of {job, batch_id, description})
-- ARGV[2...]: one value a job: its data
-- Returns one letter a job: "e" enqueued, "c" committed, "h" held by a live job, "d" a dead letter.

local answer = {}
redis.call('SADD', 'rq:queues', 'rq:queue:' .. a.queue)
for index, entry in ipairs(a.jobs) do
  local job, batch_id, description = entry[1], entry[2], entry[3]
  local status, upload = get(job, 'status'), get(job, 'upload')
  if is_committed(a.run, batch_id) then
    answer[index] = 'c'
  elseif is_live(job) then
    answer[index] = 'h'
  elseif status == 'failed' then
    answer[index] = 'd'
  elseif status == 'finished' and upload and is_live(upload) then
    answer[index] = 'h'
  elseif status == 'finished' and upload and get(upload, 'status') == 'failed' then
    answer[index] = 'd'
  else
    lift(job, a.queue)
    redis.call('HSET', 'rq:job:' .. job, 'data', ARGV[index + 1], 'description', description, 'batch_id', batch_id,
      'run', a.run, 'created_at', iso(now), unpack(a.fields))
    wait(job, a.queue, false)
    answer[index] = 'e'
  end
end
return answer
