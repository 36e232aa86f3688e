-- :name server_state
-- Identity of the server: its cluster and timeline; and whether it accepts writes.
-- A standby has no current timeline to report; it is refused before the 0 matters.
SELECT system_identifier::text,
       CASE WHEN pg_is_in_recovery() THEN 0
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer
       END AS timeline,
       pg_is_in_recovery() AS in_recovery,
       current_setting('default_transaction_read_only')::boolean AS read_only
FROM pg_control_system();

-- :name server_start
-- Another one after every restart, restore and fail-over, also behind a pooler that keeps the connections of its clients.
SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint;

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
-- The next tick belongs to the new epoch, and finds what the last one did not see.
INSERT INTO {schema}.ticks (tick, snapshot, epoch)
SELECT tick + 1, snapshot, %(epoch)s
FROM {schema}.ticks
ORDER BY tick DESC
LIMIT 1;

-- :name transaction_ids_went_back
-- True in a database that was dumped and loaded, or restored elsewhere: the next transaction id is lower than the last
-- tick's, or there are records of transactions that this cluster has yet to begin.  On the cluster that the epoch was opened
-- on, such an id was written by a producer: its record alone is isolated.
SELECT pg_snapshot_xmax(pg_current_snapshot()) < pg_snapshot_xmax(snapshot)
    OR %(is_another)s AND EXISTS (
           SELECT FROM {schema}.staged_records
           WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())
       )
FROM {schema}.ticks
ORDER BY tick DESC
LIMIT 1;

-- :name ids_behind
-- Whether ids that Postgres has would be given out again: logical replication copies rows, and no sequences.  Null if this role
-- may not see the sequence.  An id out of range was written by a producer.
SELECT CASE WHEN has_sequence_privilege(sequence, 'USAGE, SELECT')
            THEN coalesce((
                     SELECT max(id)
                     FROM {schema}.staged_records
                     WHERE id <= 9007199254740991
                 ) > coalesce(pg_sequence_last_value(sequence), 0), false)
       END
FROM CAST(pg_get_serial_sequence(%(table)s, 'id') AS regclass) AS sequence;

-- :name registered_tails
-- The last offset of every shard of a registered channel, as far as it has records: one index probe per shard.
SELECT channel, shard, journal.last_offset
FROM {schema}.channels
CROSS JOIN LATERAL generate_series(0, first_shard + coalesce(generations[cardinality(generations)], shards) - 1) AS shard
CROSS JOIN LATERAL {schema}.journal_bounds(channel, shard) AS journal
WHERE journal.last_offset > 0;

-- :name staged_at
-- Whether Postgres has a record with this id and time of staging.
SELECT EXISTS (
    SELECT
    FROM {schema}.staged_records
    WHERE id = %(id)s AND created_at = 'epoch'::timestamptz + %(staged_us)s * interval '1 microsecond'
);

-- :name bounds
-- The first and the last offset of shards in the journal: two index probes a shard.
SELECT s.channel, s.shard, journal.first_offset, journal.last_offset
FROM unnest(%(channels)s::text[], %(shards)s::int[]) AS s (channel, shard)
CROSS JOIN LATERAL {schema}.journal_bounds(s.channel, s.shard) AS journal;

-- :name every_bounds
-- Every shard in the journal with its first and last offset: three index probes per shard.
WITH RECURSIVE shards AS (
    (SELECT channel, shard FROM {schema}.journal ORDER BY channel, shard LIMIT 1)
    UNION ALL
    SELECT next.channel, next.shard
    FROM shards,
         LATERAL (
             SELECT channel, shard
             FROM {schema}.journal j
             WHERE (j.channel, j.shard) > (shards.channel, shards.shard)
             ORDER BY channel, shard
             LIMIT 1
         ) next
)
SELECT channel, shard, first_offset, last_offset
FROM shards,
     LATERAL {schema}.journal_bounds(channel, shard);

-- :name records_at
-- The journal's record at one offset of each shard, and when it was staged: the id of a lost record is given out again.
-- A time that no record can have is null, and is not compared.
SELECT p.channel, p.shard, r.id,
       CASE WHEN s.created_at BETWEEN '0001-01-02 00:00:00+00' AND '9999-12-31 00:00:00+00'
            THEN (extract(epoch FROM s.created_at) * 1000000)::bigint
       END
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

-- :name records
-- The records of a range of offsets, in the order of offsets or against it, until the payloads reach the limit; each with the
-- bytes of the payloads up to it.  Offsets that retention has removed are left out.
-- The rows of the journal before the one that holds the first of them are not read.
-- What is sorted are ids alone, before their records are looked up: 20,000 whole records would be sorted on disk, twice.
SELECT bytes, "offset", id, key, action, object,
       data::text,
       coalesce(headers::text, ''),
       (extract(epoch FROM created_at) * 1000000)::bigint
FROM (
    SELECT place."offset", place.rank, r.*,
           sum(pg_column_size(r.data)) OVER (ORDER BY place.rank ROWS UNBOUNDED PRECEDING) AS bytes
    FROM (
        SELECT n.id, at."offset", %(direction)s * at."offset" AS rank
        FROM {schema}.journal e
        CROSS JOIN LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
        CROSS JOIN LATERAL (SELECT e.first_offset + n.position - 1 AS "offset") AS at
        WHERE e.channel = %(channel)s AND e.shard = %(shard)s
          AND e.first_offset <= %(last)s
          AND e.first_offset >= coalesce((
                  SELECT max(first_offset)
                  FROM {schema}.journal
                  WHERE channel = %(channel)s AND shard = %(shard)s AND first_offset <= %(first)s
              ), 0)
          AND at."offset" BETWEEN %(first)s AND %(last)s
        ORDER BY rank
        OFFSET 0
    ) place
    JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = place.id OFFSET 0) r ON true  -- a look-up by id
) measured
WHERE bytes - pg_column_size(data) < %(bytes)s
ORDER BY rank;

-- :name missed_records
-- Records that the last tick saw, or that are isolated, and that no journal row names.  One snapshot sees a tick together with its journal rows,
-- and retention removes a journal row together with the records it names.
WITH journaled AS MATERIALIZED (
    SELECT unnest(record_ids) AS id
    FROM {schema}.journal
),
last AS (
    SELECT snapshot
    FROM {schema}.ticks
    ORDER BY tick DESC
    LIMIT 1
)
SELECT r.channel, r.shard, count(*), min(r.id), isolated.record_id IS NOT NULL AS is_isolated
FROM last
CROSS JOIN {schema}.staged_records r
LEFT JOIN {schema}.isolated_records isolated ON isolated.record_id = r.id AND isolated.xid = r.xid
WHERE (pg_visible_in_snapshot(r.xid, last.snapshot) OR isolated.record_id IS NOT NULL)
  AND NOT EXISTS (SELECT FROM journaled WHERE journaled.id = r.id)
  AND NOT EXISTS (SELECT FROM {schema}.waiting_records w WHERE w.record_id = r.id)
GROUP BY 1, 2, is_isolated
ORDER BY 1, 2, is_isolated;

-- :name offsets_since
-- Of each shard: the offset before the first record that was staged at a time or later, or its last offset if there is none;
-- and how many records are removed, if some of them may have been staged since.
-- A shard is in the order of commits, which is not that of times: a long transaction's records come late.  A row of the journal
-- is written after its records were staged, so the rows before the first one of that time hold none of them; `margin` allows
-- for a clock that was set back.  A record that is gone counts as one of that time.
WITH moment AS MATERIALIZED (
    SELECT coalesce(%(at)s::timestamptz, clock_timestamp() - %(ago)s::interval) AS at
)
SELECT s.channel, s.shard, coalesce(found."offset" - 1, journal.last_offset),
       CASE WHEN oldest.created_at >= moment.at THEN journal.first_offset - 1 ELSE 0 END,
       moment.at
FROM moment
CROSS JOIN unnest(%(channels)s::text[], %(shards)s::int[]) AS s (channel, shard)
CROSS JOIN LATERAL {schema}.journal_bounds(s.channel, s.shard) AS journal
LEFT JOIN {schema}.journal oldest
    ON oldest.channel = s.channel AND oldest.shard = s.shard AND oldest.first_offset = journal.first_offset
LEFT JOIN LATERAL (
    SELECT e.first_offset + n.position - 1 AS "offset"
    FROM {schema}.journal e
    CROSS JOIN LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
    LEFT JOIN LATERAL (SELECT created_at FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r ON true
    WHERE e.channel = s.channel AND e.shard = s.shard
      AND e.first_offset >= (
              SELECT min(first_offset)
              FROM {schema}.journal j
              WHERE j.channel = s.channel AND j.shard = s.shard AND j.created_at >= moment.at - %(margin)s::interval
          )
      AND coalesce(r.created_at >= moment.at, true)
    ORDER BY e.first_offset, n.position
    LIMIT 1
) found ON true;
