-- :name server_identity
-- Which past this server has: its cluster, its timeline, and whether it may be written to.
-- On a standby the timeline cannot be asked for; it is refused before that matters.
SELECT system_identifier::text,
       CASE WHEN pg_is_in_recovery() THEN 0
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer
       END AS timeline,
       pg_is_in_recovery() AS in_recovery,
       current_setting('default_transaction_read_only')::boolean AS read_only
FROM pg_control_system();

-- :name newest_epoch
SELECT epoch, system_identifier, timeline
FROM {schema}.epochs
ORDER BY epoch DESC
LIMIT 1;

-- :name open_epoch
INSERT INTO {schema}.epochs (epoch, system_identifier, timeline, reason)
VALUES (%(epoch)s, %(system_identifier)s, %(timeline)s, %(reason)s)
ON CONFLICT (epoch) DO NOTHING;

-- :name move_tick
-- The next tick belongs to the new epoch, and sees what the last one did not.
INSERT INTO {schema}.ticks (tick, snapshot, epoch)
SELECT tick + 1, snapshot, %(epoch)s
FROM {schema}.ticks
ORDER BY tick DESC
LIMIT 1;

-- :name registered_shards
SELECT channel, generate_series(0, shards - 1)
FROM {schema}.channels;

-- :name transaction_ids_went_back
-- True in a database that was dumped and loaded, or restored elsewhere: the next transaction id lies before the last
-- tick's, or there are records of transactions that this cluster has not begun, which it would see once more when it does.
SELECT pg_snapshot_xmax(pg_current_snapshot()) < pg_snapshot_xmax(snapshot)
    OR EXISTS (
           SELECT FROM {schema}.staged_records
           WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())
       )
FROM {schema}.ticks
ORDER BY tick DESC
LIMIT 1;

-- :name journal_tails
-- Every shard that the journal knows, and its newest entry; one probe of the index a shard.
WITH RECURSIVE known AS (
    (SELECT channel, shard FROM {schema}.journal ORDER BY channel, shard LIMIT 1)
    UNION ALL
    SELECT next.channel, next.shard
    FROM known,
         LATERAL (
             SELECT channel, shard
             FROM {schema}.journal j
             WHERE (j.channel, j.shard) > (known.channel, known.shard)
             ORDER BY channel, shard
             LIMIT 1
         ) next
)
SELECT known.channel, known.shard, oldest.first_offset, newest.last_offset
FROM known,
     LATERAL (
         SELECT first_offset
         FROM {schema}.journal j
         WHERE j.channel = known.channel AND j.shard = known.shard
         ORDER BY first_offset
         LIMIT 1
     ) oldest,
     LATERAL (
         SELECT last_offset
         FROM {schema}.journal j
         WHERE j.channel = known.channel AND j.shard = known.shard
         ORDER BY first_offset DESC
         LIMIT 1
     ) newest;

-- :name record_ids_at
-- Which records the journal has at the given places, and when they were staged: a number that was lost is given out again.
SELECT p.channel, p.shard, p."offset", r.id, (extract(epoch FROM s.created_at) * 1000000)::bigint
FROM unnest(%(channels)s::text[], %(shards)s::int[], %(offsets)s::bigint[]) AS p (channel, shard, "offset"),
     LATERAL (
         SELECT e.record_ids[p."offset" - e.first_offset + 1] AS id
         FROM (
             SELECT first_offset, record_ids
             FROM {schema}.journal j
             WHERE j.channel = p.channel AND j.shard = p.shard AND j.first_offset <= p."offset"
             ORDER BY first_offset DESC
             LIMIT 1
         ) e
     ) r
     LEFT JOIN {schema}.staged_records s ON s.id = r.id;

-- :name overlooked
-- Records that the last tick has seen and that no row of the journal names.  One snapshot sees a tick and its journal
-- together, and retention removes a journal row and the records it names together.
WITH named AS MATERIALIZED (
    SELECT unnest(record_ids) AS id
    FROM {schema}.journal
),
last AS (
    SELECT snapshot
    FROM {schema}.ticks
    ORDER BY tick DESC
    LIMIT 1
)
SELECT r.channel, r.shard, count(*), min(r.id)
FROM {schema}.staged_records r, last
WHERE pg_visible_in_snapshot(r.xid, last.snapshot)
  AND NOT EXISTS (SELECT FROM named WHERE named.id = r.id)
GROUP BY r.channel, r.shard
ORDER BY r.channel, r.shard;
