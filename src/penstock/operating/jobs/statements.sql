-- :name jobs
-- Jobs that are not done, those with the lowest ids after one first.  What a producer's SQL has left in the headers may be anything.
SELECT r.id, r.key, r.action, r.object, '' AS data,
       coalesce(r.headers::text, ''),
       (extract(epoch FROM r.created_at) * 1000000)::bigint,
       r.shard,
       w.tenant IS NOT NULL,
       clock_timestamp()
FROM {schema}.staged_records r
LEFT JOIN {schema}.waiting_records w ON w.record_id = r.id
WHERE r.channel = %(channel)s AND r.id > %(after)s AND r.id <= %(newest)s
  AND (%(ids)s::bigint[] IS NULL OR r.id = ANY (%(ids)s::bigint[]))
  AND (%(tenant)s::text IS NULL OR r.key = %(tenant)s)
  AND (%(key)s::text IS NULL OR r.headers -> %(reserved)s::text ->> 'key' = %(key)s)
  AND (%(unique)s::text IS NULL OR r.headers -> %(reserved)s::text -> 'unique' ->> 'name' = %(unique)s)
ORDER BY r.id
LIMIT %(limit)s;

-- :name newest_id
SELECT coalesce(max(id), 0)
FROM {schema}.staged_records;

-- :name cancel
SELECT count(*) FILTER (WHERE NOT is_running), count(*) FILTER (WHERE is_running)
FROM {schema}.cancel_jobs(%(channel)s, %(ids)s, NULL, NULL);

-- :name move_due
SELECT job
FROM {schema}.move_jobs(%(channel)s, %(ids)s, %(due)s) AS job;

-- :name payload
SELECT data::text, coalesce(headers::text, ''), (extract(epoch FROM created_at) * 1000000)::bigint
FROM {schema}.staged_records
WHERE channel = %(channel)s AND id = %(id)s;
