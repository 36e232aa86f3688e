-- :name sequencer_state
-- The last tick, and the transaction that has been open longest: its own records wait for it.  And whether a consumer is at work,
-- so that the sessions are to be read; and the releases of Penstock's other sessions, empty where they do not say.
SELECT t.tick, t.epoch,
       extract(epoch FROM clock_timestamp() - t.at)::float8 AS tick_s,
       pg_snapshot_xmax(t.snapshot)::text AS next,
       ARRAY(SELECT pg_snapshot_xip(t.snapshot)::text) AS in_progress,
       o.pid, o.application_name, o.state, o.age_s,
       extract(epoch FROM clock_timestamp())::float8 AS now_s,
       EXISTS (
           SELECT
           FROM pg_stat_activity
           WHERE datname = current_database() AND starts_with(application_name, 'penstock consumer ')
             AND state IS DISTINCT FROM 'idle'
       ) AS has_sessions,
       ARRAY(
           SELECT split_part(application_name, '/', 2)
           FROM pg_stat_activity
           WHERE datname = current_database() AND starts_with(application_name, 'penstock ') AND pid <> pg_backend_pid()
       ) AS releases
FROM {schema}.ticks t
LEFT JOIN LATERAL (
    SELECT pid, application_name, state, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age_s
    FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
      AND backend_type = 'client backend'
    ORDER BY xact_start
    LIMIT 1
) o ON true
ORDER BY t.tick DESC
LIMIT 1;

-- :name waiting
-- Committed and not yet sequenced: few while a streamer runs; at most `limit` are counted when none does.  Then the records
-- of queues that Redis is given later, and how many of them are due: their tenant has no room, or Redis is away.  A record that is
-- due later is given to Redis up to an hour before.
SELECT channel, shard, count(created_at),
       coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8,
       count(*) - count(created_at),
       count(*) FILTER (WHERE is_due)
FROM (
    (SELECT channel, shard, created_at, false AS is_due
     FROM {schema}.staged_records
     WHERE xid >= %(next)s::xid8
       AND xid < pg_snapshot_xmax(pg_current_snapshot())
     LIMIT %(limit)s)
    UNION ALL
    (SELECT channel, shard, created_at, false
     FROM {schema}.staged_records
     WHERE xid = ANY (%(in_progress)s::xid8[])
     LIMIT %(limit)s)
    UNION ALL
    SELECT channel, shard, NULL, tenant IS NOT NULL OR due <= clock_timestamp() - interval '1 hour'
    FROM {schema}.waiting_records
    WHERE NOT is_given
) waiting
GROUP BY channel, shard;

-- :name progress
-- Each checkpoint, its lag and the age of the next record, and on request, of one of a log that has moved within a minute, the time
-- from the staging of its record to the move; one probe of the journal's index each.  A shard of the journal
-- in which a consumer of the channel has no checkpoint counts as one before its first record: all of it is lag.
WITH readers AS (
    SELECT consumer, channel, bool_or(reported_by IS NOT NULL) AS is_reported
    FROM {schema}.checkpoints
    GROUP BY consumer, channel
),
progress AS (
    SELECT consumer, channel, shard, "offset", applied, skipped, dead, halted, waiting, updated_at, false AS unread
    FROM {schema}.checkpoints
    UNION ALL
    SELECT consumer, channel, shard, first_offset - 1, 0, 0, 0, NULL, NULL, NULL, true
    FROM unnest(%(channels)s::text[], %(shards)s::int[], %(firsts)s::bigint[]) AS sequenced (channel, shard, first_offset)
    JOIN readers USING (channel)
    WHERE NOT EXISTS (
              SELECT FROM {schema}.checkpoints c
              WHERE c.consumer = readers.consumer AND c.channel = sequenced.channel AND c.shard = sequenced.shard
          )
)
SELECT c.consumer, c.channel, c.shard, c."offset",
       greatest(journal.last_offset - c."offset", 0) AS lag,  -- 0 in another source, whose journal is not here
       coalesce(extract(epoch FROM clock_timestamp() - waiting.created_at), 0)::float8 AS lag_s,
       c.applied, c.skipped, c.dead,
       (SELECT count(*)
        FROM {schema}.dead_letters d
        WHERE d.consumer = c.consumer AND d.channel = c.channel AND d.shard = c.shard) AS dead_letters,
       c.halted, c.waiting, c.updated_at, c.unread,
       passed.latency_s,
       readers.is_reported
FROM progress c
JOIN readers USING (consumer, channel)
CROSS JOIN LATERAL {schema}.journal_bounds(c.channel, c.shard) AS journal
LEFT JOIN LATERAL (
    SELECT record_ids[c."offset" + 1 - first_offset + 1] AS id
    FROM {schema}.journal j
    WHERE j.channel = c.channel AND j.shard = c.shard AND j.first_offset <= c."offset" + 1
    ORDER BY first_offset DESC
    LIMIT 1
) following ON journal.last_offset > c."offset"
LEFT JOIN {schema}.staged_records waiting ON waiting.id = following.id
LEFT JOIN LATERAL (
    SELECT greatest(extract(epoch FROM c.updated_at - r.created_at), 0)::float8 AS latency_s
    FROM (
        SELECT record_ids[c."offset" - first_offset + 1] AS id
        FROM {schema}.journal j
        WHERE j.channel = c.channel AND j.shard = c.shard AND j.first_offset <= c."offset"
        ORDER BY first_offset DESC
        LIMIT 1
    ) last
    JOIN {schema}.staged_records r ON r.id = last.id
    JOIN {schema}.channels l ON l.channel = c.channel AND l.kind = 'log'  -- others are not passed in their order
    WHERE %(with_latency)s AND c.updated_at > clock_timestamp() - interval '1 minute' AND c.halted IS NULL AND c.waiting IS NULL
) passed ON true
ORDER BY c.consumer, c.channel, c.shard;

-- :name registered_consumers
-- A source's journal is in another database, and so is the lag behind it.
SELECT c.consumer, c.channel, count(*)::int, sum(c."offset")::bigint,
       sum(greatest(journal.last_offset - c."offset", 0)) FILTER (WHERE c.source IS NULL)::bigint,
       max(c.updated_at),
       (SELECT count(*) FROM {schema}.dead_letters d WHERE d.consumer = c.consumer AND d.channel = c.channel)
FROM {schema}.checkpoints c
CROSS JOIN LATERAL {schema}.journal_bounds(c.channel, c.shard) AS journal
WHERE %(consumer)s::text IS NULL OR c.consumer = %(consumer)s
GROUP BY c.consumer, c.channel
ORDER BY c.consumer, c.channel;

-- :name schedule_names
SELECT name FROM {schema}.schedules
ORDER BY name;

-- :name run_schedule
-- A job more: the streamer takes the time of its next job from its declaration.
UPDATE {schema}.schedules
SET next_at = least(next_at, clock_timestamp())
WHERE name = %(name)s;

-- :name readable_channels
-- Those of another source have checkpoints here, and are not registered here.
SELECT channel FROM {schema}.channels
UNION
SELECT channel FROM {schema}.checkpoints
ORDER BY channel;

-- :name halts
SELECT channel, shard, halted
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND halted IS NOT NULL
ORDER BY channel, shard;

-- :name note_action
INSERT INTO {schema}.actions (done_by, title, command)
VALUES (%(by)s, %(title)s, %(command)s);

-- :name last_action
SELECT max(id)
FROM {schema}.actions
WHERE title = %(title)s;

-- :name actions
SELECT done_at, done_by, title, command
FROM {schema}.actions
ORDER BY id DESC
LIMIT %(limit)s;

-- :name put_pause
-- The pause goes on if there is one.
INSERT INTO {schema}.pauses AS known (kind, name, reason, paused_by)
VALUES (%(kind)s, %(name)s, %(reason)s, %(by)s)
ON CONFLICT (kind, name) DO UPDATE
SET reason = excluded.reason, paused_by = excluded.paused_by
RETURNING kind, name, reason, paused_by, paused_at;

-- :name remove_pause
DELETE FROM {schema}.pauses
WHERE kind = %(kind)s AND name = %(name)s
RETURNING kind, name, reason, paused_by, paused_at;

-- :name retire_consumer
WITH letters AS (
    DELETE FROM {schema}.dead_letters
    WHERE consumer = %(consumer)s AND channel = %(channel)s
),
paused AS (
    DELETE FROM {schema}.pauses
    WHERE kind = 'consumer' AND name = %(consumer)s
)
DELETE FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND channel = %(channel)s;

-- :name has_begun
-- Whether a consumer has applied, skipped or dead-lettered anything.
SELECT coalesce(bool_or(applied + skipped + dead > 0), false)
       OR EXISTS (SELECT FROM {schema}.dead_letters WHERE consumer = %(consumer)s)
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s;

-- :name reported_names
-- Those of the names whose checkpoints are in another database: they are reported here for retention.
SELECT DISTINCT consumer
FROM {schema}.checkpoints
WHERE consumer IN (%(consumer)s, %(successor)s) AND reported_by IS NOT NULL;

-- :name live_barriers
SELECT count(*)
FROM {schema}.barriers
WHERE consumer = %(consumer)s AND expires_at > clock_timestamp();

-- :name rename_consumer
-- `reconciliations.name` is the consumer's, unless it was given another.
WITH letters AS (
    UPDATE {schema}.dead_letters
    SET consumer = %(successor)s
    WHERE consumer = %(consumer)s
),
runs AS (
    UPDATE {schema}.reconciliations
    SET consumer = %(successor)s, name = CASE WHEN name = %(consumer)s THEN %(successor)s ELSE name END
    WHERE consumer = %(consumer)s
),
barriers AS (
    DELETE FROM {schema}.barriers
    WHERE consumer = %(consumer)s
),
paused AS (
    UPDATE {schema}.pauses
    SET name = %(successor)s
    WHERE kind = 'consumer' AND name = %(consumer)s
),
former AS (
    UPDATE {schema}.former_consumers
    SET successor = %(successor)s
    WHERE successor = %(consumer)s AND consumer <> %(successor)s
),
left_behind AS (
    INSERT INTO {schema}.former_consumers (consumer, successor)
    VALUES (%(consumer)s, %(successor)s)
),
again AS (
    DELETE FROM {schema}.former_consumers
    WHERE consumer = %(successor)s
)
UPDATE {schema}.checkpoints
SET consumer = %(successor)s
WHERE consumer = %(consumer)s;

-- :name forget_consumer
WITH paused AS (
    DELETE FROM {schema}.pauses
    WHERE kind = 'consumer' AND name = %(consumer)s
)
DELETE FROM {schema}.checkpoints
WHERE consumer = %(consumer)s;

-- :name free_consumer
DELETE FROM {schema}.former_consumers
WHERE consumer = %(consumer)s
RETURNING successor;

-- :name checkpoint_bounds
-- A consumer's checkpoints and how far they can move: from before the journal's first record to its last.  Those in another
-- source, and those that another database reports, are moved from elsewhere.
SELECT c.channel, c.shard, c."offset", c.halted,
       journal.first_offset - 1,
       journal.last_offset,
       ARRAY(SELECT d."offset"
             FROM {schema}.dead_letters d
             WHERE d.consumer = c.consumer AND d.channel = c.channel AND d.shard = c.shard
             ORDER BY d."offset"),
       CASE WHEN c.source IS NOT NULL THEN 'source' WHEN c.reported_by IS NOT NULL THEN 'reported' ELSE k.kind END
FROM {schema}.checkpoints c
LEFT JOIN {schema}.channels k ON k.channel = c.channel AND c.source IS NULL
CROSS JOIN LATERAL {schema}.journal_bounds(c.channel, c.shard) AS journal
WHERE c.consumer = %(consumer)s AND (c.source IS NOT NULL OR k.channel IS NOT NULL)
ORDER BY c.channel, c.shard;

-- :name lock_checkpoints
-- A worker locks its row for a batch; this waits for it.
SELECT shard
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s
ORDER BY channel, shard
FOR UPDATE;

-- :name move_checkpoint
-- Dead letters of a log beyond the new checkpoint are deleted: their records are delivered again.  Those of members and jobs
-- are numbered otherwise, and are delivered by nobody else.  Later records of a dead letter's key beyond it are applied again,
-- after the dead letter if that is retried before.
WITH letters AS (
    DELETE FROM {schema}.dead_letters
    WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s AND "offset" > %(offset)s
      AND channel IN (SELECT channel FROM {schema}.channels WHERE kind = 'log')
),
later AS (
    UPDATE {schema}.dead_letters
    SET later_shard = NULL, later_offset = 0
    WHERE consumer = %(consumer)s AND channel = %(channel)s AND later_shard = %(shard)s AND later_offset > %(offset)s
      AND (shard <> %(shard)s OR "offset" <= %(offset)s)
)
UPDATE {schema}.checkpoints
SET "offset" = %(offset)s,
    waiting = NULL,
    halted = CASE WHEN %(resume)s THEN NULL ELSE halted END,
    dead_in_a_row = CASE WHEN %(resume)s THEN 0 ELSE dead_in_a_row END,
    updated_at = clock_timestamp()
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s;

-- :name dead_letters
-- Order is promised in logs alone; those of a source are not registered here.
SELECT consumer, channel, shard, "offset", record_id, key, action, object, staged_at, reason, attempts, parked, failed_at,
       later_shard, CASE WHEN coalesce(kind, 'log') = 'log' THEN later_offset ELSE 0 END, retry_requested_at
FROM {schema}.dead_letters
LEFT JOIN {schema}.channels USING (channel)
WHERE (%(consumer)s::text IS NULL OR consumer = %(consumer)s)
  AND (%(channel)s::text IS NULL OR channel = %(channel)s)
  AND (%(key)s::text IS NULL OR key = %(key)s)
  AND (%(error)s::text IS NULL OR split_part(reason, ':', 1) = %(error)s)
  AND failed_at >= coalesce(%(since)s::timestamptz, '-infinity')
  AND failed_at < coalesce(%(until)s::timestamptz, 'infinity')
  AND (later_shard IS NULL OR NOT %(retriable)s)
  AND (failed_at, consumer, channel, shard, "offset")  -- by the index, from where the last page ended
      < (coalesce(%(after_time)s::timestamptz, 'infinity'), %(after_consumer)s::text, %(after_channel)s::text,
         %(after_shard)s::bigint, %(after_offset)s::bigint)
ORDER BY failed_at DESC, consumer DESC, channel DESC, shard DESC, "offset" DESC
LIMIT %(limit)s;

-- :name dead_letter_groups
-- Of the newest letters, bounded: by the class of their error.
SELECT consumer, channel, split_part(reason, ':', 1) AS error, count(*), min(failed_at), max(failed_at)
FROM (
    SELECT consumer, channel, reason, failed_at
    FROM {schema}.dead_letters
    WHERE (%(consumer)s::text IS NULL OR consumer = %(consumer)s)
      AND (%(channel)s::text IS NULL OR channel = %(channel)s)
      AND (%(key)s::text IS NULL OR key = %(key)s)
      AND (%(error)s::text IS NULL OR split_part(reason, ':', 1) = %(error)s)
      AND failed_at >= coalesce(%(since)s::timestamptz, '-infinity')
      AND failed_at < coalesce(%(until)s::timestamptz, 'infinity')
      AND (later_shard IS NULL OR NOT %(retriable)s)
    ORDER BY failed_at DESC
    LIMIT %(limit)s
) newest
GROUP BY consumer, channel, error
ORDER BY count(*) DESC, consumer, channel, error;

-- :name dead_letters_of
-- In the order of the log: what is tried again is tried in it.  By the primary key, from where the last page ended.
SELECT consumer, channel, shard, "offset", record_id, key, action, object, staged_at, reason, attempts, parked, failed_at,
       later_shard, CASE WHEN coalesce(kind, 'log') = 'log' THEN later_offset ELSE 0 END, retry_requested_at
FROM {schema}.dead_letters
LEFT JOIN {schema}.channels USING (channel)
WHERE consumer = %(consumer)s
  AND (%(channel)s::text IS NULL OR channel = %(channel)s)
  AND (%(key)s::text IS NULL OR key = %(key)s)
  AND (%(error)s::text IS NULL OR split_part(reason, ':', 1) = %(error)s)
  AND failed_at >= coalesce(%(since)s::timestamptz, '-infinity')
  AND failed_at < coalesce(%(until)s::timestamptz, 'infinity')
  AND (later_shard IS NULL OR NOT %(retriable)s)
  AND (channel, shard, "offset") > (%(after_channel)s::text, %(after_shard)s::bigint, %(after_offset)s::bigint)
ORDER BY channel, shard, "offset"
LIMIT %(limit)s;

-- :name dead_letter_at
SELECT consumer, channel, shard, "offset", record_id, key, action, object, staged_at, reason, attempts, parked, failed_at,
       later_shard, CASE WHEN coalesce(kind, 'log') = 'log' THEN later_offset ELSE 0 END, retry_requested_at
FROM {schema}.dead_letters
LEFT JOIN {schema}.channels USING (channel)
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s AND "offset" = %(offset)s;

-- :name dead_letter
SELECT record_id, key, action, object, data::text, coalesce(headers::text, ''),
       (extract(epoch FROM staged_at) * 1000000)::bigint
FROM {schema}.dead_letters
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s AND "offset" = %(offset)s;

-- :name lock_shard
-- The same row that a worker locks: while a key is being freed, no record of it is parked.
SELECT
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s
FOR UPDATE;

-- :name lock_pipeline
-- In the order in which sequencer, retention, staging and consumers take their locks.  Once it is held, no transaction
-- that has staged a record is unfinished, and none can stage one.
LOCK TABLE {schema}.ticks, {schema}.journal, {schema}.staged_records, {schema}.checkpoints IN SHARE ROW EXCLUSIVE MODE;

-- :name current_snapshot
SELECT pg_current_snapshot()::text;

-- :name greatest_epoch
SELECT max(epoch)
FROM {schema}.epochs;

-- :name count_foreign
-- Records whose transaction ids this cluster has not yet assigned: they come from another cluster.  A record of this
-- cluster is visible to the snapshot of the statement that finds it, however many transactions are running.
SELECT count(*)
FROM {schema}.staged_records
WHERE xid >= pg_snapshot_xmin(pg_current_snapshot())
  AND NOT pg_visible_in_snapshot(xid, pg_current_snapshot());

-- :name freeze_foreign
-- 3 is the first id that Postgres gives to a transaction: it lies before every snapshot, so no tick finds these records again.
UPDATE {schema}.staged_records
SET xid = '3'
WHERE xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
  AND NOT pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot)
   OR xid < '3';

-- :name unsequenced
-- Records that no journal row names, without those that no tick would take: see `is_usable` of the sequencer.
WITH named AS MATERIALIZED (
    SELECT unnest(record_ids) AS id
    FROM {schema}.journal
)
SELECT r.channel,
       CASE WHEN c.generations = '{}' OR c.channel IS NULL THEN r.shard
            ELSE c.first_shard + mod(('x' || encode(substr(sha256(convert_to(r.key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint,
                                     c.generations[cardinality(c.generations)])::int  -- as `sequence_remaining`
       END,
       count(*)
FROM {schema}.staged_records r
LEFT JOIN {schema}.channels c ON c.channel = r.channel
WHERE NOT EXISTS (SELECT FROM named WHERE named.id = r.id)
  AND NOT EXISTS (SELECT FROM {schema}.waiting_records w WHERE w.record_id = r.id)
  AND created_at >= '0001-01-02 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00'
  AND id BETWEEN 0 AND 9007199254740991 AND octet_length(r.channel) <= 63
GROUP BY 1, 2
ORDER BY 1, 2;

-- :name sequence_remaining
-- Gives the same records offsets at the ends of their shards, in the order of their ids.  Those that were isolated because of
-- their xid are so no more: corrected, they would get a second offset.
WITH named AS MATERIALIZED (
    SELECT unnest(record_ids) AS id
    FROM {schema}.journal
),
placed AS (
    SELECT r.id, r.channel, r.key, r.created_at,
           CASE WHEN c.generations = '{}' OR c.channel IS NULL THEN r.shard
                ELSE c.first_shard + mod(('x' || encode(substr(sha256(convert_to(r.key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint,
                                         c.generations[cardinality(c.generations)])::int  -- as `placed` of a tick
           END AS shard
    FROM {schema}.staged_records r
    LEFT JOIN {schema}.channels c ON c.channel = r.channel
),
numbered AS (
    SELECT id, channel, shard, row_number() OVER (PARTITION BY channel, shard ORDER BY id) AS place
    FROM placed r
    WHERE NOT EXISTS (SELECT FROM named WHERE named.id = r.id)
      AND NOT EXISTS (SELECT FROM {schema}.waiting_records w WHERE w.record_id = r.id)
      AND created_at >= '0001-01-02 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00'
      AND id BETWEEN 0 AND 9007199254740991 AND octet_length(channel) <= 63
),
freed AS (
    DELETE FROM {schema}.isolated_records
    WHERE record_id IN (SELECT id FROM numbered)
),
tails AS (
    SELECT channel, shard, max(last_offset) AS tail
    FROM {schema}.journal
    GROUP BY channel, shard
)
INSERT INTO {schema}.journal (channel, shard, first_offset, last_offset, record_ids, epoch)
SELECT channel, shard, coalesce(tail, 0) + min(place), coalesce(tail, 0) + max(place), array_agg(id ORDER BY place), %(epoch)s
FROM numbered
LEFT JOIN tails USING (channel, shard)
GROUP BY channel, shard, tail, (place - 1) / %(chunk)s;

-- :name cut_at_damage
-- Journal rows from the first hole on, or from the first row that names a record that is gone (in a queue, such a one is
-- done): as far as no log and no checkpoint is that far.  Their records are sequenced again.
WITH reached AS (
    SELECT channel, shard, greatest(tail, (
               SELECT max(c."offset")
               FROM {schema}.checkpoints c
               WHERE c.channel = logs.channel AND c.shard = logs.shard
           )) AS "offset"
    FROM unnest(%(channels)s::text[], %(shards)s::int[], %(tails)s::bigint[]) AS logs (channel, shard, tail)
),
entries AS (
    SELECT channel, shard, first_offset, record_ids,
           lag(last_offset) OVER (PARTITION BY channel, shard ORDER BY first_offset) AS before
    FROM {schema}.journal
),
damaged AS (
    SELECT channel, shard, min(first_offset) AS first_offset
    FROM entries
    JOIN reached USING (channel, shard)
    WHERE first_offset > reached."offset"
      AND (first_offset <> before + 1 OR channel NOT IN (SELECT channel FROM {schema}.channels WHERE kind = 'queue') AND EXISTS (
              SELECT
              FROM unnest(record_ids) AS n (id)
              WHERE NOT EXISTS (SELECT FROM {schema}.staged_records r WHERE r.id = n.id)
          ))
    GROUP BY channel, shard
)
DELETE FROM {schema}.journal j
USING damaged
WHERE j.channel = damaged.channel AND j.shard = damaged.shard AND j.first_offset >= damaged.first_offset;

-- :name count_missing
-- Records that the journal names and that do not exist; in a queue, such a one is done.
SELECT count(*)
FROM (
    SELECT unnest(record_ids) AS id
    FROM {schema}.journal
    WHERE channel NOT IN (SELECT channel FROM {schema}.channels WHERE kind = 'queue')
) named
WHERE NOT EXISTS (SELECT FROM {schema}.staged_records r WHERE r.id = named.id);

-- :name store_snapshot
-- The next tick takes the records that this snapshot does not show.
INSERT INTO {schema}.ticks (tick, snapshot, epoch)
SELECT coalesce(max(tick), 0) + 1, %(snapshot)s::pg_snapshot, %(epoch)s
FROM {schema}.ticks;

-- :name checkpoints_beyond
-- Checkpoints beyond the end of the journal, which those in other sources are not compared with.
SELECT c.consumer, c.channel, c.shard, c."offset", journal.last_offset,
       (SELECT count(*)
        FROM {schema}.dead_letters d
        WHERE d.consumer = c.consumer AND d.channel = c.channel AND d.shard = c.shard
          AND d."offset" > journal.last_offset),
       c.reported_by IS NOT NULL
FROM {schema}.checkpoints c
CROSS JOIN LATERAL {schema}.journal_bounds(c.channel, c.shard) AS journal
WHERE c."offset" > journal.last_offset AND c.source IS NULL
ORDER BY c.consumer, c.channel, c.shard;

-- :name is_log
SELECT NOT EXISTS (SELECT FROM {schema}.channels WHERE channel = %(channel)s AND kind <> 'log');

-- :name checkpoints_of_shard
SELECT consumer, "offset", reported_by IS NOT NULL
FROM {schema}.checkpoints
WHERE channel = %(channel)s AND shard = %(shard)s
ORDER BY consumer;

-- :name still_there
-- Which of these records exist.  An id alone does not tell: those of lost commits may have been given out again.
SELECT kept.id
FROM unnest(%(ids)s::bigint[], %(staged)s::bigint[]) AS kept (id, staged_us)
JOIN {schema}.staged_records r ON r.id = kept.id
WHERE (extract(epoch FROM r.created_at) * 1000000)::bigint = kept.staged_us;

-- :name set_checkpoint_epochs
-- Those in other sources have the epochs of these.
UPDATE {schema}.checkpoints
SET epoch = %(epoch)s
WHERE source IS NULL;

-- :name skip_ids
-- The ids of the lost records are not given out again, nor those that Postgres has: a sequence stays behind in a copy by logical
-- replication.  An id out of range was written by a producer.
WITH highest AS (
    SELECT greatest(
               %(least)s,
               (SELECT max(id) FROM {schema}.staged_records WHERE id <= 9007199254740991),
               (SELECT max(id) FROM {schema}.journal, unnest(record_ids) AS n (id))
           ) AS id
)
SELECT setval(%(table)s, id)
FROM highest
WHERE id > coalesce(pg_sequence_last_value(%(table)s::regclass), 0);

-- :name id_sequence
SELECT pg_get_serial_sequence(%(table)s, 'id');

-- :name behind_in_shards
-- Each consumer of a channel: the records that it has not passed, and the shards in which it is halted.
SELECT c.consumer, sum(greatest(0, journal.last_offset - c."offset"))::bigint, count(c.halted)
FROM {schema}.checkpoints c
CROSS JOIN LATERAL {schema}.journal_bounds(c.channel, c.shard) AS journal
WHERE c.channel = %(channel)s
GROUP BY c.consumer
ORDER BY c.consumer;

-- :name begin_generation
-- Consumers have their checkpoints in the new shards from the beginning: retention waits for them.
WITH changed AS (
    UPDATE {schema}.channels
    SET generations = generations || %(shards)s::integer, first_shard = %(first_shard)s
    WHERE channel = %(channel)s
)
INSERT INTO {schema}.checkpoints (consumer, channel, shard, "offset", epoch)
SELECT c.consumer, %(channel)s, s.shard, 0, (SELECT max(epoch) FROM {schema}.epochs)
FROM (SELECT DISTINCT consumer FROM {schema}.checkpoints WHERE channel = %(channel)s) c
CROSS JOIN generate_series(%(first_shard)s::integer, %(last_shard)s) AS s (shard);

-- :name source_checkpoints
-- A consumer's checkpoints in the shards of a source.
SELECT c.channel, c.shard, c."offset", c.epoch, c.record_id, c.staged_us, c.halted,
       ARRAY(SELECT d."offset"
             FROM {schema}.dead_letters d
             WHERE d.consumer = c.consumer AND d.channel = c.channel AND d.shard = c.shard)
FROM {schema}.checkpoints c
WHERE c.consumer = %(consumer)s AND c.source = %(source)s
ORDER BY c.channel, c.shard;

-- :name newer_epochs_begin
-- In the source: the first offset of each shard that an epoch has given out which the consumer has not accepted.
SELECT a.channel, a.shard, min(j.first_offset)
FROM unnest(%(channels)s::text[], %(shards)s::int[], %(epochs)s::int[]) AS a (channel, shard, epoch)
JOIN {schema}.journal j ON j.channel = a.channel AND j.shard = a.shard AND j.epoch > a.epoch
GROUP BY a.channel, a.shard;

-- :name accept_source
-- Dead letters beyond the new checkpoint are of records that are gone.
WITH letters AS (
    DELETE FROM {schema}.dead_letters
    WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s AND "offset" > %(offset)s
)
UPDATE {schema}.checkpoints
SET "offset" = %(offset)s,
    epoch = %(epoch)s,
    record_id = %(record_id)s,
    staged_us = %(staged_us)s,
    halted = NULL,
    waiting = NULL,
    updated_at = clock_timestamp()
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s;

-- :name accept_at_source
-- In the source: its retention waits for the new checkpoint, which the database given reports from now on.
INSERT INTO {schema}.checkpoints AS c (consumer, channel, shard, "offset", epoch, reported_by)
VALUES (%(consumer)s, %(channel)s, %(shard)s, %(offset)s, %(epoch)s, %(database)s)
ON CONFLICT (consumer, channel, shard) DO UPDATE
SET "offset" = least(c."offset", excluded."offset"), reported_by = excluded.reported_by;

-- :name reporting_consumers
-- Consumers whose checkpoints are in another database.
SELECT DISTINCT consumer
FROM {schema}.checkpoints
WHERE channel = %(channel)s AND reported_by IS NOT NULL
ORDER BY consumer;

-- :name schedules
SELECT s.name, channel, every, timezone, next_at, last_at,
       CASE WHEN p.name IS NULL THEN greatest(0, extract(epoch FROM clock_timestamp() - next_at)) ELSE 0 END::float8 AS late_s,  -- 0 if there is no next
       skipped_since, skipped_until, digest, p.name IS NOT NULL, clock_timestamp()
FROM {schema}.schedules s
LEFT JOIN {schema}.pauses p ON p.kind = 'schedule' AND p.name = s.name
ORDER BY s.name;

-- :name penstock_sessions
-- Sessions of Penstock's processes, whatever they do; without their queries, which may hold payloads.
SELECT split_part(application_name, '/', 1), nullif(split_part(application_name, '/', 2), ''),
       nullif(split_part(application_name, '/', 3), ''), pid, usename, host(client_addr), backend_start, state, state_change
FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'penstock %%'
ORDER BY 1, backend_start, pid;

-- :name worker_sessions
-- Sessions of consumers whose state has not changed for long, and who holds the locks that they wait for: those that wait for nobody
-- themselves.  One that waits for another process of the same consumer, of any release, stands by.
WITH RECURSIVE sessions AS MATERIALIZED (
    SELECT pid, application_name, state, wait_event_type = 'Lock' OR state IS NULL AS may_wait,
           extract(epoch FROM clock_timestamp() - CASE state WHEN 'active' THEN query_start ELSE state_change END)::float8 AS since_s
    FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'penstock consumer %%' AND state IS DISTINCT FROM 'idle'
),
waits AS (
    SELECT s.pid AS waiting, b.pid
    FROM sessions s
    CROSS JOIN LATERAL unnest(pg_blocking_pids(s.pid)) AS b (pid)
    WHERE s.may_wait
    UNION
    SELECT w.waiting, b.pid
    FROM waits w
    CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS b (pid)
    WHERE w.pid <> 0
),
holders AS (
    SELECT DISTINCT waiting, pid
    FROM waits
    WHERE pid = 0 OR cardinality(pg_blocking_pids(pid)) = 0
)
SELECT s.pid, s.application_name,
       CASE WHEN h.pid IS NOT NULL THEN 'blocked' WHEN s.state = 'active' THEN 'statement' ELSE 'handler' END,
       s.since_s, h.pid, coalesce(a.application_name, ''), a.usename, a.state, a.query_start,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8
FROM sessions s
LEFT JOIN holders h ON h.waiting = s.pid
LEFT JOIN pg_stat_activity a ON a.pid = h.pid
WHERE (s.since_s >= %(longer_s)s OR s.since_s IS NULL AND h.pid IS NOT NULL)
  AND split_part(a.application_name, '/', 1) IS DISTINCT FROM split_part(s.application_name, '/', 1)
ORDER BY s.pid, h.pid;
