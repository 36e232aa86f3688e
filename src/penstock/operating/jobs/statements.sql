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
-- Finishes jobs, and stages them again with another time.  One that a worker has locked is waited for: it is done then, or still there.
-- The second part of the statement sees what the function has deleted.
WITH finished AS MATERIALIZED (
    SELECT {schema}.finish_records(%(channel)s, %(ids)s) AS id
),
again AS (
    INSERT INTO {schema}.staged_records (channel, shard, key, action, object, data, headers)
    SELECT r.channel, r.shard, r.key, r.action, r.object, r.data,
           h.headers || jsonb_build_object(
               %(reserved)s::text,
               CASE jsonb_typeof(h.headers -> %(reserved)s::text)
                   WHEN 'object' THEN h.headers -> %(reserved)s::text
                   ELSE '{}'
               END - 'delay_ms' || jsonb_build_object('due', %(due_ms)s::bigint)
           )
    FROM finished
    JOIN {schema}.staged_records r USING (id)
    CROSS JOIN LATERAL (
        SELECT CASE jsonb_typeof(r.headers) WHEN 'object' THEN r.headers ELSE '{}' END AS headers
    ) h
    ORDER BY r.id
)
SELECT id
FROM finished;

-- :name payload
SELECT data::text, coalesce(headers::text, ''), (extract(epoch FROM created_at) * 1000000)::bigint
FROM {schema}.staged_records
WHERE channel = %(channel)s AND id = %(id)s;
