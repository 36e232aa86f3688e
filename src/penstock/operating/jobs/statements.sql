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
  AND (%(up_to)s::bigint IS NULL OR r.id <= %(up_to)s)
  AND (%(before)s::timestamptz IS NULL OR r.created_at < %(before)s)
  AND (%(ids)s::bigint[] IS NULL OR r.id = ANY (%(ids)s::bigint[]))
  AND (%(tenant)s::text IS NULL OR r.key = %(tenant)s)
  AND (%(key)s::text IS NULL OR r.headers -> %(reserved)s::text ->> 'key' = %(key)s)
  AND (%(unique)s::text IS NULL OR r.headers -> %(reserved)s::text -> 'unique' ->> 'name' = %(unique)s)
ORDER BY r.id
LIMIT %(limit)s;

-- :name jobs_without_headers
-- The same for a role that reads no payloads, nor the headers beside them.
SELECT r.id, r.key, r.action, r.object, '' AS data,
       '',
       (extract(epoch FROM r.created_at) * 1000000)::bigint,
       r.shard,
       w.tenant IS NOT NULL,
       clock_timestamp()
FROM {schema}.staged_records r
LEFT JOIN {schema}.waiting_records w ON w.record_id = r.id
WHERE r.channel = %(channel)s AND r.id > %(after)s AND r.id <= %(newest)s
  AND (%(up_to)s::bigint IS NULL OR r.id <= %(up_to)s)
  AND (%(before)s::timestamptz IS NULL OR r.created_at < %(before)s)
  AND (%(ids)s::bigint[] IS NULL OR r.id = ANY (%(ids)s::bigint[]))
  AND (%(tenant)s::text IS NULL OR r.key = %(tenant)s)
ORDER BY r.id
LIMIT %(limit)s;

-- :name cancel
SELECT count(*) FILTER (WHERE NOT is_running), count(*) FILTER (WHERE is_running)
FROM {schema}.cancel_jobs(%(channel)s, %(ids)s, NULL, NULL);

-- :name move_due
SELECT job
FROM {schema}.move_jobs(%(channel)s, %(ids)s, %(due)s) AS job;

-- :name payload
-- A job's payload, if it is not done; what its handler has reported, and its result once it is.
SELECT n.progress, n.note, d.result::text, d.done_at,
       r.data::text, coalesce(r.headers::text, ''), (extract(epoch FROM r.created_at) * 1000000)::bigint
FROM (VALUES (%(id)s::bigint)) AS w (id)
LEFT JOIN {schema}.staged_records r ON r.id = w.id AND r.channel = %(channel)s
LEFT JOIN {schema}.job_notes n ON n.record_id = w.id AND n.channel = %(channel)s
LEFT JOIN {schema}.job_results d ON d.record_id = w.id AND d.channel = %(channel)s;

-- :name group_of
-- The group of a job.  Members have no index: groups are few, and go with their queue's `keep`.
SELECT name
FROM {schema}.job_groups
WHERE channel = %(channel)s AND %(id)s = ANY (members)
LIMIT 1;

-- :name letters
-- The dead letters of jobs.
SELECT consumer, channel, shard, "offset", record_id, key, action, object, staged_at, reason, attempts, parked, failed_at
FROM {schema}.dead_letters
WHERE channel = %(channel)s
  AND (%(up_to)s::bigint IS NULL OR record_id <= %(up_to)s)
  AND (%(before)s::timestamptz IS NULL OR staged_at < %(before)s)
  AND (%(ids)s::bigint[] IS NULL OR record_id = ANY (%(ids)s::bigint[]))
  AND (%(tenant)s::text IS NULL OR key = %(tenant)s)
  AND (%(key)s::text IS NULL OR headers -> %(reserved)s::text ->> 'key' = %(key)s)
  AND (%(unique)s::text IS NULL OR headers -> %(reserved)s::text -> 'unique' ->> 'name' = %(unique)s);

-- :name ended
-- How many of the ids are neither jobs nor dead letters any more.
SELECT CASE WHEN c.has_no_effect THEN 'cancelled' ELSE 'done' END AS state, count(*)
FROM unnest(%(ids)s::bigint[]) AS w (id)
LEFT JOIN {schema}.cancellations c ON c.record_id = w.id
WHERE NOT EXISTS (SELECT FROM {schema}.staged_records r WHERE r.id = w.id AND r.channel = %(channel)s)
  AND w.id NOT IN (SELECT record_id FROM {schema}.dead_letters WHERE channel = %(channel)s)
GROUP BY state;

-- :name limits
-- What was set, and what is declared of others; and how many these are.
SELECT kind, name, limits, set_at, count(*) OVER ()
FROM (
    SELECT kind, name, limits, set_at
    FROM {schema}.queue_limits
    WHERE channel = %(channel)s
    UNION ALL
    SELECT k.kind, d.key, d.value, NULL
    FROM {schema}.channels c
    CROSS JOIN (VALUES ('tenant'), ('key')) AS k (kind)
    CROSS JOIN jsonb_each(c.limits -> (k.kind || 's')) AS d
    WHERE c.channel = %(channel)s
      AND NOT EXISTS (
          SELECT FROM {schema}.queue_limits l WHERE (l.channel, l.kind, l.name) = (c.channel, k.kind, d.key)
      )
) AS l
WHERE %(name)s::text IS NULL OR name = %(name)s
ORDER BY kind, name COLLATE "C"
LIMIT %(limit)s;
