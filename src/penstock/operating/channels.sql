-- :name list_channels
-- The registered channels, with what the journal has of them.
SELECT c.channel, c.kind, (c.shards || c.generations)[1 + cardinality(c.generations)], extract(epoch FROM c.keep)::float8, c.entries,
       (SELECT coalesce(sum(last_offset - first_offset + 1), 0)::bigint
        FROM {schema}.journal j
        WHERE j.channel = c.channel),
       ARRAY(SELECT DISTINCT consumer FROM {schema}.checkpoints k WHERE k.channel = c.channel ORDER BY consumer)
FROM {schema}.channels c
ORDER BY c.channel;

-- :name retired_channel
SELECT
FROM {schema}.retired_channels
WHERE channel = %(channel)s;

-- :name lock_registry
-- No channel is registered, and no consumer begins, until the end of the transaction.
LOCK TABLE {schema}.channels IN SHARE ROW EXCLUSIVE MODE;

-- :name lock_ticks
-- In the order of the sequencer: no tick adds to the journal until the end of the transaction.
LOCK TABLE {schema}.ticks, {schema}.journal IN SHARE ROW EXCLUSIVE MODE;

-- :name channel_contents
-- Kind, shards, records in the journal, records that are committed and not sequenced.
SELECT c.kind,
       greatest(
           c.shards + (SELECT coalesce(sum(n), 0)::int FROM unnest(c.generations) AS n),
           (SELECT coalesce(max(shard) + 1, 0) FROM {schema}.journal j WHERE j.channel = %(channel)s)
       ),
       (SELECT coalesce(sum(last_offset - first_offset + 1), 0)::bigint FROM {schema}.journal j WHERE j.channel = %(channel)s),
       (SELECT count(*)
        FROM {schema}.staged_records r, (SELECT snapshot FROM {schema}.ticks ORDER BY tick DESC LIMIT 1) last
        WHERE r.channel = %(channel)s
          AND (r.xid >= pg_snapshot_xmax(last.snapshot) OR r.xid = ANY (ARRAY(SELECT pg_snapshot_xip(last.snapshot)))))
FROM (SELECT) one
LEFT JOIN {schema}.channels c ON c.channel = %(channel)s;

-- :name channel_readers
-- Each consumer of the channel: records that it has not passed, and its dead letters.
SELECT c.consumer,
       sum(greatest(journal.last_offset - c."offset", 0))::bigint,
       (SELECT count(*) FROM {schema}.dead_letters d WHERE d.consumer = c.consumer AND d.channel = c.channel)
FROM {schema}.checkpoints c
CROSS JOIN LATERAL {schema}.journal_bounds(c.channel, c.shard) AS journal
WHERE c.channel = %(channel)s
GROUP BY c.consumer, c.channel
ORDER BY c.consumer;

-- :name count_outstanding_jobs
-- Records of a queue that are not done.
SELECT count(*)
FROM {schema}.staged_records r
WHERE r.channel = %(channel)s;

-- :name retire_channel
-- A worker that holds a checkpoint ends its transaction first.  Replays from the channel and into it are forgotten: a new
-- channel of the name has other records.
WITH replays AS (
    DELETE FROM {schema}.replays
    WHERE %(channel)s IN (channel, target)
    RETURNING 'replay-' || replay AS consumer
),
letters AS (
    DELETE FROM {schema}.dead_letters
    WHERE channel = %(channel)s
),
barriers AS (
    DELETE FROM {schema}.barriers
    WHERE channel = %(channel)s
),
checkpoints AS (
    DELETE FROM {schema}.checkpoints
    WHERE channel = %(channel)s OR consumer IN (SELECT consumer FROM replays)
),
stopped AS (
    DELETE FROM {schema}.stopped_shards
    WHERE channel = %(channel)s
),
paused AS (
    DELETE FROM {schema}.pauses
    WHERE kind = 'channel' AND name = %(channel)s
),
registered AS (
    DELETE FROM {schema}.channels
    WHERE channel = %(channel)s
)
INSERT INTO {schema}.retired_channels (channel)
VALUES (%(channel)s)
ON CONFLICT (channel) DO NOTHING;

-- :name remove_journal
-- Some rows of the journal of a retired channel, with the records that they name.
WITH entries AS (
    DELETE FROM {schema}.journal
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM {schema}.journal WHERE channel = %(channel)s LIMIT %(entries)s))
    RETURNING record_ids
),
records AS (
    DELETE FROM {schema}.staged_records
    WHERE ctid = ANY (ARRAY(
              SELECT r.ctid
              FROM entries
              CROSS JOIN LATERAL unnest(entries.record_ids) AS n (id)
              CROSS JOIN LATERAL (SELECT ctid FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r
          ))
    RETURNING id
)
SELECT (SELECT count(*) FROM entries), (SELECT count(*) FROM records);

-- :name remove_waiting
-- And the unique names of its messages, those that were cancelled, and what is noted of its jobs.  Groups stay: one that has not ended
-- ends, since its members are gone, and what follows it may be in another queue, and read it.  Retention removes them later, as long as there is a queue.
WITH names AS (
    DELETE FROM {schema}.unique_names
    WHERE channel = %(channel)s
),
limited AS (
    DELETE FROM {schema}.queue_limits
    WHERE channel = %(channel)s
),
cancelled AS (
    DELETE FROM {schema}.cancellations
    WHERE channel = %(channel)s
),
notes AS (
    DELETE FROM {schema}.job_notes
    WHERE channel = %(channel)s
),
results AS (
    DELETE FROM {schema}.job_results
    WHERE channel = %(channel)s
),
groups AS (
    DELETE FROM {schema}.job_groups
    WHERE NOT EXISTS (SELECT FROM {schema}.channels WHERE kind = 'queue')
)
DELETE FROM {schema}.waiting_records
WHERE channel = %(channel)s;

-- :name remove_staged
-- What is left: records that no journal row names (any more).
DELETE FROM {schema}.staged_records
WHERE channel = %(channel)s;

-- :name adopt_channel
DELETE FROM {schema}.retired_channels
WHERE channel = %(channel)s;
