-- A process says that it is in a spool's folder, and hears who else says so.
--
-- a: spool_id, holder (token, number: 0 only asks; place, host, pid, folder), lease_seconds
-- Returns {since when the asker is there (now, if it only asks), entry (JSON) of another one that lives, ...}.

local key = 'hiddenq:spool:' .. a.spool_id .. ':holders'
local held = redis.call('HGETALL', key)
local since, others = precise(now), {}
for i = 1, #held, 2 do
  local is_json, entry = pcall(cjson.decode, held[i + 1])
  local seen = is_json and type(entry) == 'table' and tonumber(entry.seen)
  if not seen or now - seen > 10 * a.lease_seconds then
    redis.call('HDEL', key, held[i])
  elseif held[i] == a.holder.token then
    since = entry.since
  elseif now - seen < a.lease_seconds then
    others[#others + 1] = held[i + 1]
  end
end
if a.holder.number > 0 then
  a.holder.since, a.holder.seen = since, precise(now)
  redis.call('HSET', key, a.holder.token, cjson.encode(a.holder))
  redis.call('EXPIRE', key, EXECUTION_KEPT)
end
return { since, unpack(others) }
