-- :name positions
-- In the database of the consumer: where it stands in the shards of one source.
SELECT shard, "offset", epoch, record_id, staged_us, halted
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND channel = %(channel)s
ORDER BY shard;

-- :name begin
-- In the database of the consumer: its checkpoints in shards where it has none.  No epoch is accepted yet.
INSERT INTO {schema}.checkpoints (consumer, channel, shard, "offset", epoch, source, record_id, staged_us)
SELECT %(consumer)s, %(channel)s, b.shard, b."offset", 0, %(source)s, b.record_id, b.staged_us
FROM unnest(%(shards)s::integer[], %(offsets)s::bigint[], %(ids)s::bigint[], %(staged)s::bigint[])
         AS b (shard, "offset", record_id, staged_us)
ON CONFLICT (consumer, channel, shard) DO NOTHING;

-- :name note_records
-- In the database of the consumer: the records that its checkpoints of a transaction will be at.
UPDATE {schema}.checkpoints c
SET record_id = r.record_id, staged_us = r.staged_us
FROM unnest(%(shards)s::integer[], %(ids)s::bigint[], %(staged)s::bigint[]) AS r (shard, record_id, staged_us)
WHERE c.consumer = %(consumer)s AND c.channel = %(channel)s AND c.shard = r.shard;

-- :name accept_epoch
-- In the database of the consumer: what the log holds in this epoch follows the checkpoint.
UPDATE {schema}.checkpoints
SET epoch = %(epoch)s
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s;

-- :name database
-- Identity of a Penstock schema: its cluster, its database, its name.  A copy in another cluster is another one.
SELECT system_identifier::text || '/' || (SELECT oid::text FROM pg_database WHERE datname = current_database())
FROM pg_control_system();

-- :name registered_log
-- In the database of the source: how many shards its log has; no row before its streamer has registered it.
SELECT kind, shards, generations <> '{}'
FROM {schema}.channels
WHERE channel = %(channel)s;

-- :name register
-- In the database of the source: retention waits for these checkpoints.  Without an offset of its own, the consumer begins
-- where the journal does, or at its end.
INSERT INTO {schema}.checkpoints (consumer, channel, shard, "offset", epoch, reported_by)
SELECT %(consumer)s, %(channel)s, s.shard,
       CASE WHEN s."offset" IS NOT NULL THEN least(s."offset", journal.last_offset)
            WHEN %(latest)s THEN journal.last_offset
            ELSE journal.first_offset - 1
       END,
       (SELECT max(epoch) FROM {schema}.epochs),
       %(database)s
FROM unnest(%(shards)s::int[], %(offsets)s::bigint[]) AS s (shard, "offset"),
     LATERAL {schema}.journal_bounds(%(channel)s, s.shard) AS journal
ON CONFLICT (consumer, channel, shard) DO NOTHING;

-- :name reported
-- In the database of the source: what it knows of the consumer.
SELECT shard, "offset", epoch, reported_by
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND channel = %(channel)s
ORDER BY shard;

-- :name report
-- In the database of the source.  An epoch that was opened since the comparison has changed the row's: then nothing moves.
UPDATE {schema}.checkpoints c
SET "offset" = r."offset", updated_at = clock_timestamp()
FROM unnest(%(shards)s::integer[], %(offsets)s::bigint[], %(epochs)s::integer[]) AS r (shard, "offset", epoch)
WHERE c.consumer = %(consumer)s AND c.channel = %(channel)s AND c.shard = r.shard
  AND c.reported_by = %(database)s AND c.epoch = r.epoch AND c."offset" < r."offset";
