-- The ledger as it can be read: entries that can't be are removed, and the totals counted anew from those that are left.
--
-- a: run, batch_ids (of the entries to remove)
-- ARGV[2...]: each of those entries as it was found; one that is another by now is left alone
-- Returns how many were removed.

local removed, num_batches = 0, 0
local ledger, totals = 'hiddenq:run:' .. a.run .. ':ledger', 'hiddenq:run:' .. a.run .. ':totals'
for index, batch_id in ipairs(a.batch_ids) do
  if redis.call('HGET', ledger, batch_id) == ARGV[index + 1] then
    removed = removed + redis.call('HDEL', ledger, batch_id)
  end
end
local sums = { num_samples = 0, num_tokens = 0, num_bytes = 0 }
for _, entry in ipairs(redis.call('HVALS', ledger)) do
  local is_json, read = pcall(cjson.decode, entry)
  num_batches = num_batches + 1
  for name, sum in pairs(sums) do
    sums[name] = sum + (is_json and type(read) == 'table' and tonumber(read[name]) or 0)
  end
end
redis.call('DEL', totals)
redis.call('HSET', totals, 'num_batches', num_batches)
for name, sum in pairs(sums) do
  redis.call('HSET', totals, name, string.format('%.0f', sum))
end
return removed
