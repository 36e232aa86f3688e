-- :name ids_of_key
-- The newest records of a key that are kept; of a queue, those of a tenant.  There is no index on the key.
SELECT id
FROM {schema}.staged_records
WHERE key = %(key)s
  AND (%(channel)s::text IS NULL
       OR channel = %(channel)s)
ORDER BY id DESC
LIMIT %(limit)s;

-- :name newest_id
SELECT coalesce(max(id), 0)
FROM {schema}.staged_records;

-- :name ids_of_key_between
-- As ``ids_of_key``, among some ids: by the primary key.
SELECT id
FROM {schema}.staged_records
WHERE id > %(after)s AND id <= %(until)s AND key = %(key)s
ORDER BY id DESC
LIMIT %(limit)s;

-- :name staged_since
-- When the first record that is kept from an id on was staged; null if its time is none that a record can have.
SELECT (
           SELECT CASE WHEN created_at BETWEEN '0001-01-02 00:00:00+00' AND '9999-12-31 00:00:00+00' THEN created_at END
           FROM {schema}.staged_records
           WHERE id >= %(id)s
           ORDER BY id
           LIMIT 1
       );

-- :name id_at
-- The record at an offset; null if the journal does not name it any more.
SELECT (
           SELECT record_ids[%(offset)s - first_offset + 1]
           FROM {schema}.journal
           WHERE channel = %(channel)s AND shard = %(shard)s AND first_offset <= %(offset)s
           ORDER BY first_offset DESC
           LIMIT 1
       );

-- :name staged_record
-- A row, whether the last tick saw its transaction, and the tick that sequenced it, while it is kept: an older tick may have
-- seen the oldest one's.  A time that no record can have is null.  The channel is by the name that it has now.
WITH last AS (
    SELECT snapshot
    FROM {schema}.ticks
    ORDER BY tick DESC
    LIMIT 1
)
SELECT r.id, r.channel, r.shard, r.key, r.action, r.object, r.xid::text AS transaction,
       CASE WHEN r.created_at BETWEEN '0001-01-02 00:00:00+00' AND '9999-12-31 00:00:00+00' THEN r.created_at END AS staged_at,
       CASE WHEN current_setting('track_commit_timestamp')::boolean AND r.xid BETWEEN '3' AND pg_snapshot_xmax(pg_current_snapshot())
            THEN pg_xact_commit_timestamp(r.xid::xid)
       END AS committed_at,
       pg_visible_in_snapshot(r.xid, last.snapshot) AS is_seen,
       (
           SELECT t.tick
           FROM {schema}.ticks t
           WHERE pg_visible_in_snapshot(r.xid, t.snapshot) AND t.tick > (SELECT min(tick) FROM {schema}.ticks)
             AND NOT EXISTS (
                     SELECT FROM {schema}.ticks older WHERE older.tick = t.tick - 1 AND pg_visible_in_snapshot(r.xid, older.snapshot)
                 )
           ORDER BY t.tick
           LIMIT 1
       ) AS tick,
       (
           SELECT i.reason
           FROM {schema}.isolated_records i
           WHERE i.record_id = r.id AND i.xid = r.xid AND NOT (i.is_early AND pg_visible_in_snapshot(i.xid, last.snapshot))
       ) AS isolated
FROM {schema}.staged_records r
CROSS JOIN last
WHERE r.id = %(id)s;

-- :name place_of_record
-- Where the journal has a record; the newest rows first.  Without a shard, in all of its channel: the staged shard is that of the
-- producer, and of an older generation if the number of shards was changed.  Without a channel, anywhere.
SELECT channel, shard, first_offset + array_position(record_ids, %(id)s::bigint) - 1, created_at, epoch
FROM {schema}.journal
WHERE (%(channel)s::text IS NULL OR channel = %(channel)s)
  AND (%(shard)s::int IS NULL OR shard = %(shard)s)
  AND %(id)s = ANY (record_ids)
ORDER BY channel, shard, first_offset DESC
LIMIT 1;

-- :name letter_of_record
-- Where a record stood that is gone, and of which a dead letter is left.  Those of queues are numbered otherwise than by offset.
SELECT l.record_id AS id, l.channel, l.shard, l.key, l.action, l.object, l.staged_at,
       CASE WHEN coalesce(c.kind, 'log') = 'log' THEN l."offset" END AS "offset"
FROM {schema}.dead_letters l
LEFT JOIN {schema}.channels c USING (channel)
WHERE l.record_id = %(id)s AND l.record_id > 0
LIMIT 1;

-- :name may_read_headers
-- Whether this role may read the headers of a record, which stand beside payloads.
SELECT has_column_privilege(%(staged)s, 'headers', 'SELECT')
   AND has_column_privilege(%(letters)s, 'headers', 'SELECT');

-- :name trace_id
-- The trace in the headers of a record, or of a dead letter that is left of it.
SELECT substring(headers ->> 'traceparent' FROM '^[0-9a-f]{2}-([0-9a-f]{32})-')
FROM (
    SELECT headers
    FROM {schema}.staged_records
    WHERE id = %(id)s
    UNION ALL
    SELECT headers
    FROM {schema}.dead_letters
    WHERE record_id = %(id)s
) AS known
LIMIT 1;

-- :name shard_state
-- The kind of a channel, whether it has the shard, why the streamer leaves it out, whether the channel was retired, or
-- resharded, and the waiting record of a queue.
SELECT c.kind, coalesce(%(shard)s < c.first_shard + coalesce(c.generations[cardinality(c.generations)], c.shards), false), s.reason,
       f.channel IS NOT NULL, coalesce(c.generations <> '{}', false), w.record_id IS NOT NULL, w.is_given, w.tenant,
       extract(epoch FROM w.due - clock_timestamp())::float8
FROM (SELECT) one
LEFT JOIN {schema}.channels c ON c.channel = %(channel)s
LEFT JOIN {schema}.stopped_shards s ON s.channel = %(channel)s AND s.shard = %(shard)s
LEFT JOIN {schema}.retired_channels f ON f.channel = %(channel)s
LEFT JOIN {schema}.waiting_records w ON w.record_id = %(id)s;

-- :name job_notes
SELECT n.attempts, n.progress, d.done_at, c.has_no_effect
FROM (VALUES (%(id)s::bigint)) w (id)
LEFT JOIN {schema}.job_notes n ON n.record_id = w.id
LEFT JOIN {schema}.job_results d ON d.record_id = w.id
LEFT JOIN {schema}.cancellations c ON c.record_id = w.id;

-- :name readers
-- Every consumer of a channel, its checkpoint in a shard, and its dead letter of the record; a member of an Ick has no record.
-- What is parked is retried after the first dead letter of its key.
SELECT n.consumer, n.is_reported, c."offset", c.halted, c.waiting, c.updated_at,
       (
           SELECT min(b."offset")
           FROM {schema}.barriers b
           WHERE b.consumer = n.consumer AND b.channel = %(channel)s AND b.shard = %(shard)s
             AND b."offset" >= c."offset" AND b.expires_at > clock_timestamp()
       ),
       EXISTS (SELECT FROM {schema}.dead_letters l WHERE l.consumer = n.consumer AND l.channel = %(channel)s),
       d.reason, d.parked, d.failed_at, d.later_shard, d.later_offset, d.retried_shard, d.retried
FROM (
    SELECT consumer, bool_or(reported_by IS NOT NULL) AS is_reported
    FROM {schema}.checkpoints
    WHERE channel = %(channel)s
    GROUP BY consumer
) n
LEFT JOIN {schema}.checkpoints c ON c.consumer = n.consumer AND c.channel = %(channel)s AND c.shard = %(shard)s
LEFT JOIN LATERAL (
    SELECT reason, parked, failed_at, later_shard, later_offset,
           coalesce(before.shard, l.shard) AS retried_shard, coalesce(before."offset", l."offset") AS retried
    FROM {schema}.dead_letters l
    LEFT JOIN LATERAL (
        SELECT e.shard, e."offset"
        FROM {schema}.dead_letters e
        WHERE l.parked AND e.consumer = l.consumer AND e.channel = l.channel
          AND e.shard = ANY (ARRAY(SELECT generate_series(
                  CASE WHEN EXISTS (SELECT FROM {schema}.channels WHERE channel = %(channel)s AND generations <> '{}')
                       THEN 0
                       ELSE %(shard)s::integer
                  END,
                  %(shard)s::integer
              )))
          AND hashtextextended(e.key, 0) = hashtextextended(l.key, 0) AND e.key = l.key
        ORDER BY e.shard, e."offset"
        LIMIT 1
    ) before ON true
    WHERE l.consumer = n.consumer AND l.channel = %(channel)s AND l.shard = %(shard)s
      AND (l.record_id = %(id)s OR l.record_id = 0 AND l.key = %(key)s)
    ORDER BY l."offset"
    LIMIT 1
) d ON true
ORDER BY n.consumer;

-- :name situation
-- What holds for all records: the last tick, connected streamers, row-level security, the last id that was drawn (null
-- without the right to see it), and whether retention has removed anything; the newest id of the rows from which on all is kept.
SELECT t.tick, extract(epoch FROM clock_timestamp() - t.at)::float8,
       (SELECT count(*)
        FROM pg_stat_activity
        WHERE datname = current_database() AND split_part(application_name, '/', 1) = 'penstock streamer'),
       (SELECT relrowsecurity FROM pg_class WHERE oid = %(table)s::text::regclass),
       CASE WHEN has_sequence_privilege(pg_get_serial_sequence(%(table)s::text, 'id'), 'SELECT, USAGE')
            THEN coalesce(pg_sequence_last_value(pg_get_serial_sequence(%(table)s::text, 'id')::regclass), 0)
       END,
       (
           SELECT max(j.record_ids[cardinality(j.record_ids)])
           FROM unnest(%(channels)s::text[], %(shards)s::int[], %(firsts)s::bigint[]) AS s (channel, shard, first_offset)
           JOIN {schema}.journal j USING (channel, shard, first_offset)
           WHERE first_offset > 1
       )
FROM {schema}.ticks t
ORDER BY t.tick DESC
LIMIT 1;

-- :name open_writers
-- Transactions that have inserted into staged_records, or deleted from it, and are not committed: they hold the lock on the table
-- until they end.  Those of prepared ones name no process; which transaction they are of, the lock on its id says.
SELECT l.pid, p.gid, nullif(a.application_name, ''), a.state,
       extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8,
       coalesce(a.usename, p.owner)::text,
       CASE WHEN %(with_query)s THEN a.query END
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_prepared_xacts p ON l.pid IS NULL AND p.transaction IN (
    SELECT own.transactionid
    FROM pg_locks own
    WHERE own.locktype = 'transactionid' AND own.pid IS NULL AND own.virtualtransaction = l.virtualtransaction
)
WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.granted
  AND l.relation = %(table)s::text::regclass
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.pid IS DISTINCT FROM pg_backend_pid()
ORDER BY coalesce(a.xact_start, p.prepared), l.pid;
