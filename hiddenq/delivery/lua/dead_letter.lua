-- failed -> queued ("retry": with all its attempts before it again) or gone ("drop").
--
-- a: action, jobs
-- Returns how many were dead letters.

local num = 0
for _, job in ipairs(a.jobs) do
  local queue = get(job, 'origin')
  if queue and get(job, 'status') == 'failed' then
    num = num + 1
    if a.action == 'retry' then
      redis.call('HDEL', 'rq:job:' .. job, 'attempts', 'remakes', 'deaths')
      wait(job, queue, false)
    else
      let_go(job)
      erase(job, queue)
    end
  end
end
return num
