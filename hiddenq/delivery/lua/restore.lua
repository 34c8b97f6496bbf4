-- Upload jobs -> queued for shards that lie in a spool although Redis knows nothing of them (it was wiped).
--
-- a: run, batch_id, execution, extract_job, extract_queue, upload_job, upload_queue, spool_id, file_name,
--    fields_of_extract (number of values)
-- ARGV[2...]: the extract job's hash (fields_of_extract values), then the upload job's
-- Returns 1 if the job was made, 0 if the batch is committed or something live holds it.

local upload = get(a.extract_job, 'upload')
if is_committed(a.run, a.batch_id) or redis.call('EXISTS', 'rq:job:' .. a.upload_job) == 1
  or get(a.extract_job, 'status') == 'started' or (upload and is_live(upload)) then
  return 0
end
redis.call('LREM', 'rq:queue:' .. a.extract_queue, 1, a.extract_job)
lift(a.extract_job, a.extract_queue)
redis.call('HSET', 'rq:job:' .. a.extract_job, 'created_at', iso(now), unpack(ARGV, 2, 1 + a.fields_of_extract))
complete(a.extract_job, a.extract_queue, a.execution, nil)
redis.call('HSET', 'rq:job:' .. a.extract_job, 'upload', a.upload_job)
redis.call('HSET', 'rq:job:' .. a.upload_job, 'created_at', iso(now), unpack(ARGV, 2 + a.fields_of_extract))
wait(a.upload_job, a.upload_queue, false)
redis.call('HSET', 'hiddenq:spool:' .. a.spool_id .. ':files', a.file_name, a.upload_job)
redis.call('ZADD', 'hiddenq:spools', precise(now), a.spool_id)
return 1
