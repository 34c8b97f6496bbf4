-- What every script stands on: the glossary of keys, the Redis clock, and the moves that a job can make.
-- It is put in front of each of the other files; a script is one atomic step.
--
-- ARGV[1] is a JSON object of named arguments (`a`); binary values (a job's hash fields) follow from ARGV[2].
-- Keys are made from names in here, so the server must be one Redis, not a cluster.
--
-- RQ's own keys, laid out as RQ 3.0.0 lays them out:
--   rq:queues                               set of queue keys
--   rq:queue:{queue}                        list of job ids; the next one is on the left
--   rq:job:{job}                            hash of a job. Ours beside RQ's fields: run, batch_id; execution (whose
--                                           it is while started or finished); attempts (charged failures); deaths
--                                           (of its processes, uncharged); remakes; delay; upload (of an extract
--                                           job: its newest upload job); file_name, spool_id (of an upload job)
--   rq:wip:{queue}                          zset "{job}:{execution}"; score +inf, which RQ's cleanup never reaches
--   rq:finished|failed|scheduled:{queue}    zsets of job ids
--   rq:execution:{job}:{execution}          hash of one execution. Ours beside RQ's: queue, host, device, stage,
--                                           gpu_at, lease_seconds, alone (its worker holds nothing else)
--   rq:executions:{job}                     zset of executions
--   rq:worker:{name}, rq:worker:{name}:executions, rq:workers, rq:workers:{queue}
--   rq:results:{job}                        stream of outcomes. Ours beside RQ's fields: number, host, device, error
-- hiddenq's:
--   hiddenq:leases                          zset "{job}:{execution}" -> Redis time at which the lease ends
--   hiddenq:delayed                         zset job -> Redis time at which it is due (rq:scheduled mirrors it)
--   hiddenq:executions                      zset execution -> Redis time of its last renewal
--   hiddenq:runs                            set of runs
--   hiddenq:run:{run}                       hash: record, state
--   hiddenq:run:{run}:ledger                hash batch_id -> ledger entry (JSON)
--   hiddenq:run:{run}:totals                hash: num_batches, num_samples, num_tokens, num_bytes
--   hiddenq:run:{run}:dead                  zset job -> Redis time at which it was set aside
--   hiddenq:run:{run}:foreign               the same, of jobs that are no batches of the run's plan
--   hiddenq:run:{run}:seconds               list of the newest batch times
--   hiddenq:run:{run}:checks                list of the newest self-checks (JSON)
--   hiddenq:run:{run}:finishing             lock of the process that writes index and manifest
--   hiddenq:owner:{location}                who runs a location (JSON)
--   hiddenq:spools                          zset spool_id -> Redis time of its last heartbeat
--   hiddenq:spool:{spool_id}                hash: host
--   hiddenq:spool:{spool_id}:files          hash file name -> upload job that still needs it
--   hiddenq:spool:{spool_id}:holders        hash token -> who works in which folder (JSON; spool_holders.py)
--   hiddenq:workers                         hash "{role}:{target}" -> report (JSON)
--   hiddenq:workers:seen                    zset "{role}:{target}" -> Redis time of its last report
--   hiddenq:drained                         set of hosts that take no more work
--   hiddenq:epoch                           another text after Redis lost its data
-- Their types stand in key_types.py, too.

local a = cjson.decode(ARGV[1])
local INF = '+inf'
local EXECUTION_KEPT = 86400 -- seconds for which RQ's execution keys outlive their last renewal
local FINISHED_KEPT = 3600 -- seconds for which a job stays that turned out to be committed already
local RESULTS_KEPT = 20 -- entries of a job's results
local SUCCESSFUL, FAILED, RETRIED = 1, 2, 4 -- RQ's Result.Type

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local now = clock()

-- RQ's timestamp format, e.g. 2026-11-29T23:31:07.250000Z; days to a date as in Howard Hinnant's civil_from_days.
local known_iso = {}
local function iso(time)
  if known_iso[time] then
    return known_iso[time]
  end
  local seconds = math.floor(time)
  local days, rest = math.floor(seconds / 86400) + 719468, seconds % 86400
  local era = math.floor(days / 146097)
  local day_of_era = days - era * 146097
  local year_of_era = math.floor((day_of_era - math.floor(day_of_era / 1460) + math.floor(day_of_era / 36524)
    - math.floor(day_of_era / 146096)) / 365)
  local day_of_year = day_of_era - (365 * year_of_era + math.floor(year_of_era / 4) - math.floor(year_of_era / 100))
  local shifted = math.floor((5 * day_of_year + 2) / 153)
  local day = day_of_year - math.floor((153 * shifted + 2) / 5) + 1
  local month = shifted < 10 and shifted + 3 or shifted - 9
  local year = year_of_era + era * 400 + (month <= 2 and 1 or 0)
  known_iso[time] = string.format('%04d-%02d-%02dT%02d:%02d:%02d.%06dZ', year, month, day, math.floor(rest / 3600),
    math.floor(rest % 3600 / 60), rest % 60, math.floor((time - seconds) * 1e6))
  return known_iso[time]
end

local function precise(time)
  return string.format('%.6f', time)
end

local function get(job, field)
  return redis.call('HGET', 'rq:job:' .. job, field) or nil
end

-- The fence: whether this execution is the one that the job belongs to now.
local function owns(job, execution)
  local found = redis.call('HMGET', 'rq:job:' .. job, 'status', 'execution')
  return found[1] == 'started' and found[2] == execution
end

local function is_live(job)
  local status = get(job, 'status')
  return status == 'queued' or status == 'started' or status == 'scheduled'
end

local function is_committed(run, batch_id)
  return redis.call('HEXISTS', 'hiddenq:run:' .. run .. ':ledger', batch_id) == 1
end

-- The execution whose shard is the batch's; nil if there is none, or an entry that can't be read.
local function winner(run, batch_id)
  local entry = redis.call('HGET', 'hiddenq:run:' .. run .. ':ledger', batch_id)
  local is_json, read = pcall(cjson.decode, entry or '')
  return is_json and type(read) == 'table' and read.execution or nil
end

-- Takes an execution out of every place that says it is running.
local function release(job, execution)
  local member = job .. ':' .. execution
  local worker = redis.call('HGET', 'rq:execution:' .. member, 'worker_name') or get(job, 'worker_name') or ''
  redis.call('ZREM', 'hiddenq:leases', member)
  redis.call('ZREM', 'rq:wip:' .. (get(job, 'origin') or ''), member)
  redis.call('ZREM', 'rq:executions:' .. job, execution)
  redis.call('SREM', 'rq:worker:' .. worker .. ':executions', member)
  redis.call('DEL', 'rq:execution:' .. member)
end

-- Counts an ended execution with its worker, as `rq info` shows it.
local function count(job, execution, field)
  local found = redis.call('HMGET', 'rq:execution:' .. job .. ':' .. execution, 'worker_name', 'created_at')
  local key = 'rq:worker:' .. (found[1] or '')
  if found[1] and redis.call('EXISTS', key) == 1 then
    redis.call('HINCRBY', key, field, 1)
    redis.call('HINCRBYFLOAT', key, 'total_working_time', precise(math.max(now - tonumber(found[2]), 0)))
  end
end

-- One entry of the job's results stream. `story` gives number, error, exc (base64 of zlib, as RQ writes it) and, if
-- they are not those of the execution's own hash, worker, host and device.
local function record(job, execution, kind, story)
  local key = 'rq:execution:' .. job .. ':' .. execution
  local found = redis.call('HMGET', key, 'worker_name', 'created_at', 'host', 'device')
  local worker = story and story.worker or found[1] or ''
  local fields = { 'type', kind, 'worker_name', worker, 'execution_id', execution,
    'execution_started_at', found[2] or precise(now), 'execution_ended_at', precise(now) }
  if story then
    local device = story.device and story.device ~= '' and story.device or found[4]
    for _, pair in ipairs({ { 'exc_string', story.exc }, { 'error', story.error }, { 'number', story.number },
      { 'host', story.host or found[3] }, { 'device', device } }) do
      if pair[2] then
        fields[#fields + 1], fields[#fields + 2] = pair[1], pair[2]
      end
    end
  end
  redis.call('XADD', 'rq:results:' .. job, 'MAXLEN', RESULTS_KEPT, '*', unpack(fields))
end

-- Out of the place of a job that neither waits nor runs, whichever it is in.
local function lift(job, queue)
  local found = redis.call('HMGET', 'rq:job:' .. job, 'status', 'run')
  local status, run = found[1], found[2]
  if status == 'scheduled' then
    redis.call('ZREM', 'hiddenq:delayed', job)
    redis.call('ZREM', 'rq:scheduled:' .. queue, job)
  elseif status == 'failed' then
    redis.call('ZREM', 'rq:failed:' .. queue, job)
    if run then
      redis.call('ZREM', 'hiddenq:run:' .. run .. ':dead', job)
      redis.call('ZREM', 'hiddenq:run:' .. run .. ':foreign', job)
    end
  elseif status == 'finished' then
    redis.call('ZREM', 'rq:finished:' .. queue, job)
  end
end

-- Removes a job and what is known of it.
local function erase(job, queue)
  lift(job, queue)
  redis.call('DEL', 'rq:job:' .. job, 'rq:results:' .. job, 'rq:executions:' .. job)
end

-- -> queued; `front`: before all others. A batch of a cancelled run is removed instead.
local function wait(job, queue, front)
  local run = get(job, 'run')
  local is_batch = run and queue == 'hiddenq-extract-' .. run
  if is_batch and redis.call('HGET', 'hiddenq:run:' .. run, 'state') == 'cancelled' then
    erase(job, queue)
    return
  end
  lift(job, queue)
  redis.call('HSET', 'rq:job:' .. job, 'status', 'queued', 'enqueued_at', iso(now), 'started_at', '', 'ended_at', '',
    'worker_name', '')
  redis.call('HDEL', 'rq:job:' .. job, 'execution', 'delay', 'exc_info')
  redis.call('PERSIST', 'rq:job:' .. job)
  redis.call('SADD', 'rq:queues', 'rq:queue:' .. queue)
  redis.call(front and 'LPUSH' or 'RPUSH', 'rq:queue:' .. queue, job)
end

-- -> scheduled: waits so many seconds for its next attempt.
local function delay(job, queue, seconds)
  lift(job, queue)
  redis.call('HSET', 'rq:job:' .. job, 'status', 'scheduled', 'delay', seconds)
  redis.call('HDEL', 'rq:job:' .. job, 'execution')
  redis.call('ZADD', 'hiddenq:delayed', precise(now + seconds), job)
  redis.call('ZADD', 'rq:scheduled:' .. queue, math.floor(now + seconds), job)
end

-- Whether a job is one of a batch in the run's plan: batches are numbered from 0, and a job's id has its batch's in it.
-- What else says that it is the run's (a message pushed into Redis) must not end the run, nor be counted with it.
local function is_planned(job, run)
  local id = get(job, 'batch_id') or ''
  local number = string.match(id, '^%d+$') and tonumber(id)
  if not number or id ~= string.format('%06d', number) or string.sub(job, 1, #run + #id + 1) ~= run .. '-' .. id then
    return false
  end
  local record = redis.call('HGET', 'hiddenq:run:' .. run, 'record') or ''
  local num_batches = string.match(record, '"num_batches":(%d+)')
  return not num_batches or number < tonumber(num_batches)
end

-- -> failed: a dead letter. `exc_info` is what RQ's tools show.
local function bury(job, queue, reason)
  lift(job, queue)
  redis.call('HSET', 'rq:job:' .. job, 'status', 'failed', 'ended_at', iso(now), 'exc_info', reason)
  redis.call('HDEL', 'rq:job:' .. job, 'execution')
  redis.call('ZADD', 'rq:failed:' .. queue, -1, job) -- RQ's "never expires"
  local run = get(job, 'run')
  if run then
    redis.call('ZADD', 'hiddenq:run:' .. run .. (is_planned(job, run) and ':dead' or ':foreign'), precise(now), job)
  end
end

-- -> finished. It stays until its batch is committed, then `kept` seconds more (nil: not committed yet).
local function complete(job, queue, execution, kept)
  lift(job, queue)
  redis.call('HSET', 'rq:job:' .. job, 'status', 'finished', 'ended_at', iso(now), 'execution', execution)
  redis.call('ZADD', 'rq:finished:' .. queue, kept and precise(now + kept) or INF, job)
  if kept then
    redis.call('EXPIRE', 'rq:job:' .. job, kept)
    redis.call('EXPIRE', 'rq:results:' .. job, kept)
  end
end

-- The upload job needs its file no more.
local function let_go(job)
  local found = redis.call('HMGET', 'rq:job:' .. job, 'spool_id', 'file_name')
  if found[1] and found[2] then
    redis.call('HDEL', 'hiddenq:spool:' .. found[1] .. ':files', found[2])
  end
end
