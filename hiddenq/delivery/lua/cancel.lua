-- A run takes no more claims: its waiting and delayed extract jobs are removed. What is started or waits for its upload
-- goes on to its end.
--
-- a: run, queue
-- Returns how many jobs were removed.

local num = 0
redis.call('HSET', 'hiddenq:run:' .. a.run, 'state', 'cancelled')
for _, job in ipairs(redis.call('LRANGE', 'rq:queue:' .. a.queue, 0, -1)) do
  if get(job, 'status') == 'queued' then
    erase(job, a.queue)
    num = num + 1
  end
end
redis.call('DEL', 'rq:queue:' .. a.queue)
for _, job in ipairs(redis.call('ZRANGE', 'rq:scheduled:' .. a.queue, 0, -1)) do
  erase(job, a.queue)
  num = num + 1
end
return num
