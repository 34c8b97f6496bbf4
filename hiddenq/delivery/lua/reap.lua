-- Gives back what dead executions held, and wakes what is due. Any process may run it, any number at once.
--
-- a: expected_now (what the Redis clock should say by the caller's own), tolerance_seconds, lease_seconds,
--    max_attempts, retry_delays, spool_dead_seconds, exc (base64 of zlib)
-- Returns {"ok" or "jump", Redis time, given back, set aside, woken, spool, ...}: spools without a heartbeat in which
-- shards wait. On a jump nothing was done.
--
-- A batch that was on the GPU is charged, and so is whatever its worker held alone (claim.lua): the first time it goes
-- to the front at once, then it waits longer and longer. Any other death is counted, and costs nothing. A score further
-- ahead than a lease or a delay can be is the trace of a clock that went back: it is cut.

local SOME = 500

if math.abs(now - a.expected_now) > a.tolerance_seconds then
  return { 'jump', precise(now), 0, 0, 0 }
end

local function cut(key, ahead, longest)
  local beyond = precise(now + ahead + a.tolerance_seconds)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, beyond, INF, 'LIMIT', 0, SOME)) do
    local seconds = longest(member)
    if tonumber(redis.call('ZSCORE', key, member)) > now + seconds + a.tolerance_seconds then
      redis.call('ZADD', key, precise(now + seconds), member)
    end
  end
end

cut('hiddenq:leases', a.lease_seconds, function(member)
  return tonumber(redis.call('HGET', 'rq:execution:' .. member, 'lease_seconds') or a.lease_seconds)
end)
cut('hiddenq:delayed', 0, function(job)
  return tonumber(get(job, 'delay') or '0')
end)
cut('hiddenq:spools', 0, function()
  return 0
end)

local back, dead, woken = 0, 0, 0
for _, member in ipairs(redis.call('ZRANGEBYSCORE', 'hiddenq:leases', '-inf', precise(now), 'LIMIT', 0, SOME)) do
  local job, execution = string.match(member, '^(.*):(.*)$')
  local queue = get(job, 'origin')
  if not owns(job, execution) or not queue then
    release(job, execution)
  else
    local found = redis.call('HMGET', 'rq:execution:' .. member, 'stage', 'worker_name', 'alone')
    local on_gpu = found[1] == 'gpu'
    local charged, attempts = on_gpu or found[3] ~= false, 0
    if charged then
      attempts = redis.call('HINCRBY', 'rq:job:' .. job, 'attempts', 1)
      local story = 'WorkerDied: ' .. (found[2] or '?') .. ' died or lost its lease while '
        .. (on_gpu and 'this batch was on its GPU' or 'it held nothing but this job, in stage ' .. (found[1] or '?'))
      count(job, execution, 'failed_job_count')
      record(job, execution, attempts >= a.max_attempts and FAILED or RETRIED,
        { number = attempts, error = story, exc = a.exc })
    else
      redis.call('HINCRBY', 'rq:job:' .. job, 'deaths', 1)
    end
    release(job, execution)
    if charged and attempts >= a.max_attempts then
      bury(job, queue, (on_gpu and 'died on the GPU ' or 'its process died ') .. attempts .. ' times')
      dead = dead + 1
    elseif attempts > 1 then
      delay(job, queue, a.retry_delays[math.min(attempts - 1, #a.retry_delays)])
      back = back + 1
    else
      wait(job, queue, true)
      back = back + 1
    end
  end
end

for _, job in ipairs(redis.call('ZRANGEBYSCORE', 'hiddenq:delayed', '-inf', precise(now), 'LIMIT', 0, SOME)) do
  redis.call('ZREM', 'hiddenq:delayed', job)
  if get(job, 'status') == 'scheduled' then
    wait(job, get(job, 'origin'), false)
    woken = woken + 1
  end
end

local abandoned, silent_since = {}, precise(now - a.spool_dead_seconds)
for _, spool in ipairs(redis.call('ZRANGEBYSCORE', 'hiddenq:spools', '-inf', silent_since, 'LIMIT', 0, SOME)) do
  local queue = 'hiddenq-upload-' .. spool
  if redis.call('EXISTS', 'rq:queue:' .. queue) + redis.call('ZCARD', 'rq:scheduled:' .. queue) > 0 then
    abandoned[#abandoned + 1] = spool
  elseif tonumber(redis.call('ZSCORE', 'hiddenq:spools', spool)) < now - EXECUTION_KEPT
    and redis.call('EXISTS', 'hiddenq:spool:' .. spool .. ':files') == 0 then
    redis.call('ZREM', 'hiddenq:spools', spool)
    redis.call('DEL', 'hiddenq:spool:' .. spool)
    redis.call('SREM', 'rq:queues', 'rq:queue:' .. queue)
  end
end

-- Now and then, by whoever comes first: forget what nobody asks about any more, and give a lease to what runs without
-- one (someone deleted the key): its worker renews it, or it runs out.
if redis.call('SET', 'hiddenq:swept', '1', 'NX', 'EX', 60) then
  redis.call('ZREMRANGEBYSCORE', 'hiddenq:executions', '-inf', precise(now - EXECUTION_KEPT))
  for _, key in ipairs(redis.call('SMEMBERS', 'rq:queues')) do
    local queue = string.match(key, '^rq:queue:(hiddenq%-.*)$')
    if queue then
      redis.call('ZREMRANGEBYSCORE', 'rq:finished:' .. queue, '-inf', precise(now))
      for _, member in ipairs(redis.call('ZRANGE', 'rq:wip:' .. queue, 0, -1)) do
        redis.call('ZADD', 'hiddenq:leases', 'NX', precise(now + a.lease_seconds), member)
      end
    end
  end
end

return { 'ok', precise(now), back, dead, woken, unpack(abandoned) }
