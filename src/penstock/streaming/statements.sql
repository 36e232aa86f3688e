-- :name identity_cache
-- How many ids a connection draws ahead; anything but 1 puts the changes of a key out of order.
SELECT seqcache
FROM pg_sequence
WHERE seqrelid = pg_get_serial_sequence(%(table)s, 'id')::regclass;

-- :name look
-- The last tick, and whether there is a record that it did not show: all that an idle round asks, and it writes nothing.
-- Asked by order, not by EXISTS: that makes it one probe of the index even where old statistics promise many.
SELECT tick, epoch,
       (
           SELECT xid
           FROM {schema}.staged_records
           WHERE xid >= pg_snapshot_xmax(snapshot)
             AND xid < pg_snapshot_xmax(pg_current_snapshot())
           ORDER BY xid
           LIMIT 1
       ) IS NOT NULL
    OR (
           SELECT xid
           FROM {schema}.staged_records
           WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(snapshot)))
           ORDER BY xid
           LIMIT 1
       ) IS NOT NULL
FROM {schema}.ticks
ORDER BY tick DESC
LIMIT 1;

-- :name isolate
-- Whatever the server's default is: what is one statement has one snapshot, and a SERIALIZABLE transaction would have the
-- application's own fail, for it reads where they write.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;

-- :name prepare_tick
-- The commit reaches the disk before anything reaches Redis, whatever the server's default is.  And what is new is found
-- by its index, whatever old statistics say of a table that has just grown, and sorted in memory, if it is not very much.
SELECT set_config('synchronous_commit', 'on', true),
       set_config('enable_seqscan', 'off', true),
       set_config('jit', 'off', true),
       set_config('work_mem', '64MB', true);

-- :name sequence_committed
-- What this snapshot shows and the last tick's did not, numbered by id within each shard, into the journal in chunks; if
-- there is nothing, no tick.  The rows that a snapshot shows are those whose transactions committed before it, so no test
-- of visibility is needed beside Postgres' own.
-- A statement has one snapshot from its beginning to its end, so that it may be a transaction of its own.
-- The tick comes first, and all else asks for it: a second sequencer waits at its primary key for the first one to
-- commit, and then begins again (40001 or 23505).  The last tick is read, not locked.
-- Ids are sorted alone, and nearly are already: beside their places that takes Postgres five times as long.  An array
-- has its limit, so that they come in portions, of a range of ids each.
-- Of much, nothing but ids and places leaves the table; what is little comes along whole, and need not be read again.
WITH last AS MATERIALIZED (
    SELECT tick, snapshot, epoch
    FROM {schema}.ticks
    ORDER BY tick DESC
    LIMIT 1
),
begun AS (
    INSERT INTO {schema}.ticks (tick, snapshot, epoch)
    SELECT tick + 1, pg_current_snapshot(), epoch
    FROM last
    -- as `look` asks
    WHERE (
              SELECT xid
              FROM {schema}.staged_records
              WHERE xid >= pg_snapshot_xmax(snapshot)
                AND xid < pg_snapshot_xmax(pg_current_snapshot())
              ORDER BY xid
              LIMIT 1
          ) IS NOT NULL
       OR (
              SELECT xid
              FROM {schema}.staged_records
              WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(snapshot)))
              ORDER BY xid
              LIMIT 1
          ) IS NOT NULL
    RETURNING tick, epoch
),
seen AS MATERIALIZED (
    SELECT last.snapshot
    FROM last
    JOIN begun ON begun.tick = last.tick + 1
),
committed AS (
    SELECT channel, shard, id >> 20 AS portion, array_agg(id) AS ids
    FROM (
        SELECT id, channel, shard
        FROM {schema}.staged_records
        WHERE xid >= (SELECT pg_snapshot_xmax(snapshot) FROM seen)
          AND xid < pg_snapshot_xmax(pg_current_snapshot())
        UNION ALL
        SELECT id, channel, shard
        FROM {schema}.staged_records
        WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(snapshot) FROM seen))
    ) new
    GROUP BY channel, shard, portion
),
-- MATERIALIZED: a portion is sorted once, not for each of its chunks
sorted AS MATERIALIZED (
    SELECT channel, shard,
           sum(cardinality(ids)) OVER (PARTITION BY channel, shard ORDER BY portion) - cardinality(ids) AS before,
           ARRAY(SELECT unnest(ids) ORDER BY 1) AS ids
    FROM committed
),
entries AS (
    INSERT INTO {schema}.journal (channel, shard, first_offset, last_offset, record_ids, epoch)
    SELECT s.channel, s.shard,
           coalesce(t.last_offset, 0) + before + "from",
           coalesce(t.last_offset, 0) + before + least("from" + %(chunk)s - 1, cardinality(ids)),
           ids["from" : "from" + %(chunk)s - 1],
           (SELECT epoch FROM begun)
    FROM sorted s
    LEFT JOIN LATERAL (
        SELECT last_offset
        FROM {schema}.journal j
        WHERE j.channel = s.channel AND j.shard = s.shard
        ORDER BY first_offset DESC
        LIMIT 1
    ) t ON true
    CROSS JOIN LATERAL generate_series(1, cardinality(ids), %(chunk)s::integer) AS "from"
    RETURNING channel, shard, first_offset, last_offset, record_ids
),
shards AS (
    SELECT channel, shard, max(last_offset) AS tail, sum(last_offset - first_offset + 1)::bigint AS records
    FROM entries
    GROUP BY channel, shard
),
little AS (
    SELECT channel, shard, "offset", id, key, action, object, data, headers, created_at
    FROM (
        SELECT e.channel, e.shard, e.first_offset + n.position - 1 AS "offset",
               r.id, r.key, r.action, r.object, r.data, r.headers, r.created_at,
               sum(pg_column_size(r.data)) OVER (
                   ORDER BY e.channel, e.shard, e.first_offset, n.position
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
               ) AS weight_before
        FROM entries e
        CROSS JOIN LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
        CROSS JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r
        WHERE (SELECT sum(records) FROM shards) <= %(little)s
    ) weighed
    WHERE coalesce(weight_before, 0) < %(bytes)s
)
SELECT coalesce(begun.tick, last.tick), last.epoch, shards.channel, shards.shard, shards.tail, shards.records,
       "offset", id, key, action, object,
       data::text,
       coalesce(headers::text, ''),
       (extract(epoch FROM created_at) * 1000000)::bigint
FROM last
LEFT JOIN begun ON true
LEFT JOIN shards ON true
LEFT JOIN little ON little.channel = shards.channel AND little.shard = shards.shard
ORDER BY shards.channel, shards.shard, "offset";

-- :name tick_anew
-- A tick that sequences nothing: its snapshot is the same past, told anew.
INSERT INTO {schema}.ticks (tick, snapshot, epoch)
SELECT tick + 1, pg_current_snapshot(), epoch
FROM {schema}.ticks
ORDER BY tick DESC
LIMIT 1
RETURNING tick;

-- :name unpublished
-- The records of a shard after its tail, in order, payloads as text.  The first is tail + 1, or where the journal begins.
-- The weight of what is already chosen ends the portion early, so that large payloads do not fill a worker's memory;
-- pg_column_size reads no payload.
SELECT "offset", wanted, id, key, action, object,
       data::text,
       coalesce(headers::text, ''),
       (extract(epoch FROM created_at) * 1000000)::bigint
FROM (
    SELECT place."offset", place.id AS wanted, r.id, r.key, r.action, r.object, r.data, r.headers, r.created_at,
           sum(coalesce(pg_column_size(r.data), 0)) OVER (
               ORDER BY place."offset"
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
           ) AS weight_before
    FROM (
        SELECT e.first_offset + n.position - 1 AS "offset", n.id
        FROM (
            -- from the entry that holds tail + 1, or the journal's oldest; offsets are dense, so that no entry beyond
            -- start + records can be wanted
            SELECT first_offset, record_ids
            FROM {schema}.journal,
                 LATERAL (
                     SELECT coalesce(
                                (SELECT max(first_offset)
                                 FROM {schema}.journal
                                 WHERE channel = %(channel)s AND shard = %(shard)s AND first_offset <= %(tail)s + 1),
                                (SELECT min(first_offset)
                                 FROM {schema}.journal
                                 WHERE channel = %(channel)s AND shard = %(shard)s)
                            ) AS at
                 ) start
            WHERE channel = %(channel)s AND shard = %(shard)s
              AND first_offset >= start.at
              AND first_offset < greatest(start.at, %(tail)s + 1) + %(records)s
        ) e,
        LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
        WHERE e.first_offset + n.position - 1 > %(tail)s
        ORDER BY 1
        LIMIT %(records)s
    ) place
    -- OFFSET 0 keeps this a look-up by id: a general plan would rather read the whole table
    LEFT JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = place.id OFFSET 0) r ON true
) weighed
WHERE coalesce(weight_before, 0) < %(bytes)s
ORDER BY "offset";

-- :name icks
-- The channels that are lists of what is dirty; all others are logs.
SELECT channel
FROM {schema}.channels
WHERE kind = 'ick';

-- :name prepare_retention
-- Nobody waits for long for a retention that is suspended while it holds the channel: the server ends its transaction.
SELECT set_config('idle_in_transaction_session_timeout', '10s', true),
       set_config('enable_seqscan', 'off', true);

-- :name floor
-- How far every consumer of the shard has come; null if nobody reads it.
SELECT min("offset")
FROM {schema}.checkpoints
WHERE channel = %(channel)s AND shard = %(shard)s;

-- :name forget
-- Journal rows that every consumer has passed and that `keep` no longer holds, with the records they name.  Rows go by
-- the journal's ids, never by range: a record that was missed stays.  The shard's newest row stays for its offsets.
-- The journal is looked up by a range, and records one by one (OFFSET 0) and then by their places on disk: a join is
-- planned by statistics, which know nothing of a table that has just grown, and took fifty times as long.
WITH newest AS (
    SELECT first_offset
    FROM {schema}.journal
    WHERE channel = %(channel)s AND shard = %(shard)s
    ORDER BY first_offset DESC
    LIMIT 1
),
passed AS (
    SELECT first_offset,
           sum(last_offset - first_offset + 1) OVER (
               ORDER BY first_offset
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
           ) AS named_before
    FROM {schema}.journal
    WHERE channel = %(channel)s AND shard = %(shard)s
      AND last_offset <= %(floor)s
      AND created_at < statement_timestamp() - %(keep)s::interval
      AND first_offset < (SELECT first_offset FROM newest)
    ORDER BY first_offset
    LIMIT %(records)s
),
entries AS (
    DELETE FROM {schema}.journal
    WHERE channel = %(channel)s AND shard = %(shard)s
      AND first_offset <= (SELECT max(first_offset) FROM passed WHERE coalesce(named_before, 0) < %(records)s)
      -- as above: where a clock was set, rows are not in the order of their times
      AND created_at < statement_timestamp() - %(keep)s::interval
    RETURNING first_offset, last_offset, record_ids
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
SELECT (SELECT coalesce(sum(last_offset - first_offset + 1), 0)::bigint FROM entries),
       (SELECT count(*) FROM records),
       (SELECT max(last_offset) FROM entries);

-- :name forget_ticks
DELETE FROM {schema}.ticks
WHERE tick < (SELECT max(tick) FROM {schema}.ticks) - %(kept)s;
