-- :name identity_cache
-- How many ids a connection draws ahead.  Anything but 1 puts the changes of a key out of order.
SELECT seqcache
FROM pg_sequence
WHERE seqrelid = pg_get_serial_sequence(%(table)s, 'id')::regclass;

-- :name newest_tick
-- The newest tick, and whether records were committed since.  An idle round runs only this, and writes nothing.
-- ORDER BY xid LIMIT 1 instead of EXISTS: it takes one index probe even if stale statistics promise many rows.
SELECT tick, epoch,
       (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint AS server_start_us,
       (
           SELECT xid
           FROM {schema}.staged_records
           WHERE xid >= pg_snapshot_xmax(snapshot)
             AND xid < pg_snapshot_xmax(pg_current_snapshot())
             AND pg_visible_in_snapshot(xid, (SELECT pg_current_snapshot()))
           ORDER BY xid
           LIMIT 1
       ) IS NOT NULL
    OR (
           SELECT xid
           FROM {schema}.staged_records
           WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(snapshot)))
             AND pg_visible_in_snapshot(xid, (SELECT pg_current_snapshot()))
           ORDER BY xid
           LIMIT 1
       ) IS NOT NULL AS has_new_records
FROM {schema}.ticks
ORDER BY tick DESC
LIMIT 1;

-- :name isolate
-- Independent of the server's default.  READ COMMITTED suffices: the tick is one statement, so it has one snapshot.
-- SERIALIZABLE would make the application's own transactions fail, because a tick reads where they write.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;

-- :name prepare_tick
-- synchronous_commit: the journal is on disk before anything reaches Redis, whatever the server's default is.
-- enable_seqscan: new records are found by index, even if stale statistics describe a table that has just grown.
-- work_mem: a tick of up to about a million ids sorts in memory.
SELECT set_config('synchronous_commit', 'on', true),
       set_config('enable_seqscan', 'off', true),
       set_config('work_mem', '64MB', true);

-- :name sequence_committed
-- One tick: gives an offset to every record that is visible now and was not visible to the previous tick.
--
--   1. Find the records     ticking, new_records, resharded, placed, id_ranges
--   2. Begin the tick       new_tick
--   3. Write the journal    isolated, sorted_ids, entries
--   4. Report               sequenced_shards, inline_records
--
-- All four are one statement, because one statement has one snapshot: `ticks` stores exactly the snapshot that chose
-- the records, and the statement can be a transaction of its own.  If nothing was committed, there is no tick.
--
-- A tick of a slice (see `tick_slices.py`) is given an older snapshot, `target`, and the tick that it must follow, `after`: after
-- any other, nothing happens.
-- Result: one row a shard that got offsets, or one row a record where the tick returns records inline; if nothing was
-- sequenced, one row with the previous tick and nulls.
WITH
-- 1. Find the records.  The previous tick is read, not locked.  A new record's transaction began after its snapshot, the baseline,
-- or was in progress in it.  Postgres itself shows only rows whose transactions have committed.  pg_visible_in_snapshot compares
-- the column besides, because a producer may have written any number into it: each value is found by one tick and no other.
ticking AS MATERIALIZED (
    SELECT tick, epoch, snapshot AS baseline, coalesce(%(target)s::pg_snapshot, pg_current_snapshot()) AS target,
           tick = coalesce(%(after)s::bigint, tick) AS is_next
    FROM {schema}.ticks
    ORDER BY tick DESC
    LIMIT 1
),
new_records AS (
    SELECT id, channel, shard, key,
           created_at >= '0001-01-02 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00' AS has_time
    FROM {schema}.staged_records
    WHERE xid >= (SELECT greatest(pg_snapshot_xmax(baseline), '3') FROM ticking WHERE is_next)
      AND xid < (SELECT pg_snapshot_xmax(target) FROM ticking)
      AND pg_visible_in_snapshot(xid, (SELECT target FROM ticking))
    UNION ALL
    SELECT id, channel, shard, key,
           created_at >= '0001-01-02 00:00:00+00' AND created_at < '9999-12-31 00:00:00+00' AS has_time
    FROM {schema}.staged_records
    WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(baseline) FROM ticking WHERE is_next))
      AND pg_visible_in_snapshot(xid, (SELECT target FROM ticking))
),
-- Channels whose number of shards was changed.  Ticks are one after the other, and each sees what the one before saw: from one
-- tick on, all new records are in the newest generation.
resharded AS MATERIALIZED (
    SELECT array_agg(channel) AS channels,
           array_agg(first_shard) AS first_shards,
           array_agg(generations[cardinality(generations)]) AS shards
    FROM {schema}.channels
    WHERE generations <> '{}'
),
-- There, the key alone decides the shard: the one that was staged is of the number of shards that the producer declares.
placed AS (
    SELECT id, has_time, channel,
           CASE WHEN channel = ANY ((SELECT channels FROM resharded)::text[])
                THEN (SELECT first_shards FROM resharded)[array_position((SELECT channels FROM resharded), channel)]
                     + mod(('x' || encode(substr(sha256(convert_to(key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint,
                           (SELECT shards FROM resharded)[array_position((SELECT channels FROM resharded), channel)])::int
                ELSE shard
           END AS shard
    FROM new_records
),
-- `is_usable` is true of everything that Penstock stages: a time that a record can have, an id that Lua counts exactly (below
-- 2^53), a name that a channel can have.
-- Bare ids are nearly sorted and sort five times faster than rows.  An array has a size limit: one array per 2^20 ids.
id_ranges AS (
    SELECT channel, shard, id >> 20 AS id_range, array_agg(id) AS ids,
           has_time AND id >> 20 BETWEEN 0 AND 8589934591 AND octet_length(channel) <= 63 AS is_usable
    FROM placed
    GROUP BY channel, shard, id_range, has_time
),

-- 2. Begin the tick.  The journal depends on `new_tick`, so a second sequencer waits at the primary key of `ticks` until the first
-- commits, then fails (40001 or 23505) and starts again.
new_tick AS (
    INSERT INTO {schema}.ticks (tick, snapshot, epoch)
    SELECT tick + 1, target, epoch
    FROM ticking
    WHERE EXISTS (SELECT FROM id_ranges)
    RETURNING tick, epoch
),

-- 3. Write the journal.  Records that cannot be used get no offset.  One whose row is corrected, with another xid, is found by the
-- next tick.
isolated AS (
    INSERT INTO {schema}.isolated_records AS known (record_id, xid, channel, shard, reason)
    SELECT r.id, r.xid, left(r.channel, 63), r.shard,
           CASE WHEN r.id NOT BETWEEN 0 AND 9007199254740991 THEN 'id is out of range'
                WHEN octet_length(r.channel) > 63 THEN 'channel is longer than 63 bytes'
                ELSE 'created_at is ' || r.created_at
           END
    FROM id_ranges
    CROSS JOIN LATERAL unnest(ids) AS n (id)
    CROSS JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r
    WHERE NOT is_usable
    ON CONFLICT (record_id) DO UPDATE
    SET number = DEFAULT, xid = excluded.xid, reason = excluded.reason, is_early = excluded.is_early, isolated_at = DEFAULT
    WHERE known.xid <> excluded.xid OR known.is_early
),
-- MATERIALIZED: sorts each array once, not once per chunk.
sorted_ids AS MATERIALIZED (
    SELECT channel, shard,
           sum(cardinality(ids)) OVER (PARTITION BY channel, shard ORDER BY id_range) - cardinality(ids) AS before,
           ARRAY(SELECT unnest(ids) ORDER BY 1) AS ids
    FROM id_ranges
    WHERE is_usable
),
entries AS (
    INSERT INTO {schema}.journal (channel, shard, first_offset, last_offset, record_ids, epoch)
    SELECT s.channel, s.shard,
           journal.last_offset + before + "from",
           journal.last_offset + before + least("from" + %(chunk)s - 1, cardinality(ids)),
           ids["from" : "from" + %(chunk)s - 1],
           (SELECT epoch FROM new_tick)
    FROM sorted_ids s
    CROSS JOIN LATERAL {schema}.journal_bounds(s.channel, s.shard) AS journal
    CROSS JOIN LATERAL generate_series(1, cardinality(ids), %(chunk)s::integer) AS "from"
    RETURNING channel, shard, first_offset, last_offset, record_ids
),

-- 4. Report.  A large tick returns only shards and their new tails.  A small one also returns its records, so the
-- publisher need not read them again: in order, until their payloads exceed the limit.
sequenced_shards AS (
    SELECT channel, shard, max(last_offset) AS tail, sum(last_offset - first_offset + 1)::bigint AS records
    FROM entries
    GROUP BY channel, shard
),
inline_records AS (
    SELECT channel, shard, "offset", id, key, action, object, data, headers, created_at
    FROM (
        SELECT e.channel, e.shard, e.first_offset + n.position - 1 AS "offset",
               r.id, r.key, r.action, r.object, r.data, r.headers, r.created_at,
               sum(pg_column_size(r.data)) OVER (
                   ORDER BY e.channel, e.shard, e.first_offset, n.position
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
               ) AS bytes_before
        FROM entries e
        CROSS JOIN LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
        CROSS JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r
        WHERE (SELECT sum(records) FROM sequenced_shards) <= %(max_inline_records)s
    ) measured
    WHERE coalesce(bytes_before, 0) < %(max_inline_bytes)s
)
SELECT coalesce(new_tick.tick, ticking.tick), ticking.epoch,
       (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
       s.channel, s.shard, s.tail, s.records,
       "offset", id, key, action, object,
       data::text,
       coalesce(headers::text, ''),
       (extract(epoch FROM created_at) * 1000000)::bigint
FROM ticking
LEFT JOIN new_tick ON true
LEFT JOIN sequenced_shards s ON true
LEFT JOIN inline_records i ON i.channel = s.channel AND i.shard = s.shard
ORDER BY s.channel, s.shard, "offset";

-- :name prepare_plan
-- Records are read in the order of the index, and no further than to the limit.  Without statistics, as of a table that has
-- just grown, Postgres would read and sort all of them.
SELECT set_config('enable_seqscan', 'off', true),
       set_config('enable_bitmapscan', 'off', true),
       set_config('enable_sort', 'off', true),
       set_config('work_mem', '64MB', true);

-- :name plan_slices
-- The last tick, the snapshot up to which slices are planned, and both taken apart.
SELECT tick, snapshot::text, now::text,
       greatest(pg_snapshot_xmax(snapshot), '3')::text::bigint, ARRAY(SELECT pg_snapshot_xip(snapshot)::text::bigint),
       pg_snapshot_xmax(now)::text::bigint, ARRAY(SELECT pg_snapshot_xip(now)::text::bigint)
FROM {schema}.ticks, (SELECT pg_current_snapshot() AS now OFFSET 0) current
ORDER BY tick DESC
LIMIT 1;

-- :name plan_slice
-- The last `max_records` records before the transaction `before` that `target` shows and `baseline` does not, in whole
-- transactions: the first of these (null if there are none before), the number of records, the least of the
-- transactions' last ids; and the transactions whose last id is greater than `bound`.
-- Ids that get no offset have no order.
WITH edge AS (
    SELECT xid
    FROM (
        (SELECT xid
         FROM {schema}.staged_records
         WHERE xid >= %(begin)s::text::xid8 AND xid < %(before)s::text::xid8
           AND pg_visible_in_snapshot(xid, %(target)s::pg_snapshot)
         ORDER BY xid DESC
         LIMIT %(max_records)s)
        UNION ALL
        (SELECT xid
         FROM {schema}.staged_records
         WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(%(baseline)s::pg_snapshot))) AND xid < %(before)s::text::xid8
           AND pg_visible_in_snapshot(xid, %(target)s::pg_snapshot)
         ORDER BY xid DESC
         LIMIT %(max_records)s)
    ) candidates
    ORDER BY xid DESC
    LIMIT 1
    OFFSET %(max_records)s - 1
),
first AS (
    SELECT coalesce((SELECT xid FROM edge), '0') AS xid
),
transactions AS (
    SELECT xid, count(*) AS records, max(id) FILTER (WHERE id BETWEEN 0 AND 9007199254740991) AS last_id
    FROM (
        SELECT xid, id
        FROM {schema}.staged_records
        WHERE xid >= greatest(%(begin)s::text::xid8, (SELECT xid FROM first)) AND xid < %(before)s::text::xid8
          AND pg_visible_in_snapshot(xid, %(target)s::pg_snapshot)
        UNION ALL
        SELECT xid, id
        FROM {schema}.staged_records
        WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(%(baseline)s::pg_snapshot)))
          AND xid >= (SELECT xid FROM first) AND xid < %(before)s::text::xid8
          AND pg_visible_in_snapshot(xid, %(target)s::pg_snapshot)
    ) slice
    GROUP BY xid
)
SELECT (SELECT xid::text::bigint FROM edge),
       coalesce(sum(records), 0)::bigint,
       min(last_id),
       coalesce(array_agg(ARRAY[xid::text::bigint, records, last_id]) FILTER (WHERE last_id > %(bound)s::bigint), '{}')
FROM transactions;

-- :name tick_without_records
-- A tick that sequences nothing: it stores a newer snapshot of the same state.
INSERT INTO {schema}.ticks (tick, snapshot, epoch)
SELECT tick + 1, pg_current_snapshot(), epoch
FROM {schema}.ticks
ORDER BY tick DESC
LIMIT 1
RETURNING tick;

-- :name keep_memory
-- Once a session.  At the end of a statement, glibc returns its memory to the system, unless a block as large was freed before: to fetch
-- it again, page by page, took a quarter of the processor time of reading payloads of 2,000 bytes.  At most twice as much is kept.
-- Space by space it takes six times as long, and a constant is computed, and copied, by the planner.
SELECT octet_length(repeat(repeat(' ', 8192), n)) FROM generate_series(1024, 1024) AS n;

-- :name prepare_reading
-- Rows are read by their ids, and joined with their places by a hash.  A plan for any number of them, made while the table was
-- small, would read all of it, or compare each row with each place, which took 30 times as long; one made while the table was
-- small but had many removed rows would sort all payloads.
SELECT set_config('enable_seqscan', 'off', true),
       set_config('enable_bitmapscan', 'off', true),
       set_config('enable_nestloop', 'off', true);

-- :name unpublished
-- The records of a shard after its tail, as columns of lines (see `penstock.batches`), as nearly always: without a gap, all of them
-- there, in the order of their ids, and their payloads below the byte limit.  No row otherwise: `unpublished_checked` then says
-- what is there.  The result is that of `unpublished_checked`, which takes longer; lines that are equal are one.
-- An array is written as text faster than its members one by one: strings come as pretty JSON arrays, a line each.  A double takes
-- less time than extract's numeric, and has every microsecond up to 2^32 seconds from 1970.
WITH entries AS MATERIALIZED (
    SELECT first_offset, record_ids,
           first_offset = lag(last_offset, 1, first_offset - 1) OVER entry + 1
           AND record_ids[1] > lag(record_ids[cardinality(record_ids)], 1, -1::bigint) OVER entry AS follows
    FROM {schema}.journal_entries(%(channel)s, %(shard)s, %(tail)s, %(records)s)
    WINDOW entry AS (ORDER BY first_offset)
),
wanted AS MATERIALIZED (
    SELECT first, ids[first - begins + 1 : first - begins + %(records)s] AS ids
    FROM (
        SELECT min(first_offset) AS begins, greatest(min(first_offset), %(tail)s + 1) AS first,
               ARRAY(SELECT unnest(record_ids) FROM entries ORDER BY first_offset) AS ids
        FROM entries
        HAVING bool_and(follows)
    ) journaled
),
-- In the order of the index, which takes no sort and no join: an id has its place by its rank.
batch AS MATERIALIZED (
    SELECT r.id, r.key, r.action, r.object, r.data, r.headers,
           CASE WHEN r.created_at BETWEEN '1900-01-01 00:00:00+00' AND '2106-01-01 00:00:00+00'
                THEN (date_part('epoch', r.created_at) * 1000000)::bigint
                ELSE (extract(epoch FROM r.created_at) * 1000000)::bigint
           END AS us
    FROM {schema}.staged_records r
    WHERE r.id = ANY ((SELECT ids FROM wanted)::bigint[])
    ORDER BY r.id
),
head AS MATERIALIZED (
    SELECT us, action, object
    FROM batch
    LIMIT 1
),
-- Of a queue, or of a damaged journal, fewer records come than ids.
found AS MATERIALIZED (
    SELECT array_agg(id) = (SELECT ids FROM wanted) AND sum(pg_column_size(data)) < %(bytes)s AS is_usual,
           bool_or(action <> (SELECT action FROM head)) AS has_actions,
           bool_or(object <> (SELECT object FROM head)) AS has_objects,
           bool_or(headers IS NOT NULL) AS has_headers
    FROM batch
)
SELECT (SELECT first FROM wanted), (SELECT first + cardinality(ids) - 1 FROM wanted), count(*), NULL::bigint, 0::bigint, NULL::bigint,
       (SELECT ids[1] FROM wanted), (SELECT us FROM head),
       (SELECT array_to_string(ARRAY(SELECT id - ids[1] - place + 1 FROM unnest(ids) WITH ORDINALITY AS n (id, place)), E'\n') FROM wanted),
       array_to_json(array_agg(key), true)::text,
       coalesce(
           array_to_json(array_agg(action) FILTER (WHERE (SELECT has_actions FROM found)), true),
           (SELECT array_to_json(ARRAY[action]) FROM head)
       )::text,
       coalesce(
           array_to_json(array_agg(object) FILTER (WHERE (SELECT has_objects FROM found)), true),
           (SELECT array_to_json(ARRAY[object]) FROM head)
       )::text,
       string_agg(data::text, E'\n'),
       coalesce(string_agg(coalesce(headers::text, ''), E'\n') FILTER (WHERE (SELECT has_headers FROM found)), ''),
       array_to_string(array_agg(us - (SELECT us FROM head)), E'\n')
FROM batch
WHERE (SELECT is_usual FROM found)
HAVING count(*) > 0;

-- :name unpublished_checked
-- The records of a shard after its tail, as columns of lines (see `penstock.batches`).  The first is tail + 1, or the
-- journal's oldest.  A batch ends early once its payloads exceed the byte limit, which bounds a worker's memory;
-- pg_column_size does not read the payload itself.
-- Besides: the first and the last offset, the number of records, the first offset that does not follow the one before, the number of
-- records that are gone and the first of their ids; id and time of the first record.
WITH places AS MATERIALIZED (
    SELECT e.first_offset + n.place - 1 AS "offset", n.id
    FROM {schema}.journal_entries(%(channel)s, %(shard)s, %(tail)s, %(records)s) e,
         LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, place)
    WHERE e.first_offset + n.place > %(tail)s + 1
    ORDER BY 1
    LIMIT %(records)s
)
SELECT min("offset"), max("offset"), count(*),
       min("offset") FILTER (WHERE "offset" <> first_offset + number - 1),
       count(*) FILTER (WHERE is_gone), min(journaled_id) FILTER (WHERE is_gone),
       min(first_id), min(first_us),
       string_agg((journaled_id - first_id - number + 1)::text, E'\n'),
       array_to_json(array_agg(key), true)::text,
       array_to_json(array_agg(action), true)::text,
       array_to_json(array_agg(object), true)::text,
       string_agg(coalesce(data::text, ''), E'\n'),
       string_agg(coalesce(headers::text, ''), E'\n'),
       string_agg((coalesce(us, first_us) - first_us)::text, E'\n')
FROM (
    SELECT place."offset", place.id AS journaled_id, r.id IS NULL AS is_gone,
           r.key, r.action, r.object, r.data, r.headers, place_us.us,
           row_number() OVER batch AS number,
           coalesce(first_value(place."offset") OVER batch, place."offset") AS first_offset,
           coalesce(first_value(place.id) OVER batch, place.id) AS first_id,
           coalesce(first_value(coalesce(place_us.us, 0)) OVER batch, place_us.us, 0) AS first_us,
           sum(coalesce(pg_column_size(r.data), 0)) OVER batch AS bytes_before
    FROM places place
    -- Each of these is in `places`, so this is a left join; a full one is never planned as a nested loop, which took 30 times as long.
    FULL JOIN (
        SELECT r.*
        FROM (SELECT array_agg(id) AS ids FROM places) wanted,
             LATERAL (SELECT * FROM {schema}.staged_records WHERE id = ANY (wanted.ids) OFFSET 0) r
    ) r ON r.id = place.id
    CROSS JOIN LATERAL (SELECT (extract(epoch FROM r.created_at) * 1000000)::bigint AS us) place_us
    WINDOW batch AS (
        ORDER BY place."offset"
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
    ORDER BY "offset"
) measured
WHERE coalesce(bytes_before, 0) < %(bytes)s
HAVING count(*) > 0;

-- :name journal_goes_back
-- True if the journal has an offset of the shard up to the tail: then what is missing after it was not removed by retention, which
-- removes the oldest.
SELECT EXISTS (
    SELECT
    FROM {schema}.journal
    WHERE channel = %(channel)s AND shard = %(shard)s AND first_offset <= %(tail)s
);

-- :name prepare_retention
-- Bounds how long others wait for a retention that is suspended while it holds the channel: the server ends its
-- transaction after 10 s.
SELECT set_config('idle_in_transaction_session_timeout', '10s', true),
       set_config('enable_seqscan', 'off', true);

-- :name slowest_checkpoint
-- The offset that every consumer of the shard has passed; null if the shard has no consumer.
SELECT min("offset")
FROM {schema}.checkpoints
WHERE channel = %(channel)s AND shard = %(shard)s;

-- :name remove_passed
-- Removes journal rows that every consumer has passed and that `keep` no longer holds, with the records they name.
-- Records go by the journal's ids, never by range: a record that was missed stays.  The shard's newest row stays, because
-- it holds the last offset.
-- The journal is read by a range, records one by one (OFFSET 0) and deleted by ctid: a join is planned by statistics,
-- which do not describe a table that has just grown, and took fifty times as long.
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
           ) AS records_before
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
      AND first_offset <= (SELECT max(first_offset) FROM passed WHERE coalesce(records_before, 0) < %(records)s)
      -- again, because after a clock was set rows are not in the order of their times
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
SELECT (SELECT coalesce(sum(last_offset - first_offset + 1), 0)::bigint FROM entries) AS journaled,
       (SELECT count(*) FROM records) AS removed,
       (SELECT max(last_offset) FROM entries) AS last_offset;

-- :name remove_old_ticks
DELETE FROM {schema}.ticks
WHERE tick < (SELECT max(tick) FROM {schema}.ticks) - %(kept)s;

-- :name isolate_unreachable
-- Rows that no tick finds: their xid is of a transaction that has not begun, or of none at all (3 is the first).
-- At most `limit` are noted of either, however many there are.
INSERT INTO {schema}.isolated_records (record_id, xid, channel, shard, reason, is_early)
SELECT id, xid, left(channel, 63), shard,
       'xid is ' || xid::text || ', of a transaction that ' || CASE WHEN is_early THEN 'has not begun' ELSE 'never was' END,
       is_early
FROM (
    (SELECT id, xid, channel, shard, true AS is_early
     FROM {schema}.staged_records
     WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())
     ORDER BY xid
     LIMIT %(limit)s)
    UNION ALL
    (SELECT id, xid, channel, shard, false
     FROM {schema}.staged_records
     WHERE xid < '3'
     ORDER BY xid
     LIMIT %(limit)s)
) unreachable
WHERE NOT EXISTS (
          SELECT
          FROM {schema}.isolated_records known
          WHERE known.record_id = unreachable.id AND known.xid = unreachable.xid
      )
ON CONFLICT (record_id) DO UPDATE
SET number = DEFAULT, xid = excluded.xid, reason = excluded.reason, is_early = excluded.is_early, isolated_at = DEFAULT;

-- :name newest_record
-- The current snapshot, and the greatest id that it shows.
SELECT pg_current_snapshot()::text, coalesce(max(id), 0)
FROM {schema}.staged_records
WHERE id <= 9007199254740991;

-- :name isolate_overtaken
-- Rows of which every tick is too late: their xid is of a transaction that had ended before they were inserted.  `shown` is
-- an earlier snapshot, and showed no id greater than `last`: a later row's transaction had not ended in it.
-- At most `limit` rows are examined.  Result: the current snapshot, the last id, the number of rows.
WITH later AS (
    SELECT id, xid, channel, shard
    FROM {schema}.staged_records
    WHERE id > %(last)s AND id <= 9007199254740991
    ORDER BY id
    LIMIT %(limit)s
),
-- The next tick finds what ended after the newest one; a tick that came after a pause may have found it already.
overtaken AS MATERIALIZED (
    SELECT id, xid, channel, shard
    FROM later
    WHERE xid >= '3' AND pg_visible_in_snapshot(xid, %(shown)s::pg_snapshot)
      AND pg_visible_in_snapshot(xid, (SELECT snapshot FROM {schema}.ticks ORDER BY tick DESC LIMIT 1))
),
isolated AS (
    INSERT INTO {schema}.isolated_records (record_id, xid, channel, shard, reason)
    SELECT id, xid, left(channel, 63), shard,
           'xid is ' || xid::text || ', of a transaction that ended before this record was staged'
    FROM overtaken
    WHERE id NOT IN (
              SELECT unnest(record_ids)
              FROM {schema}.journal
              WHERE channel IN (SELECT channel FROM overtaken)
          )
    ON CONFLICT (record_id) DO UPDATE
    SET number = DEFAULT, xid = excluded.xid, reason = excluded.reason, is_early = excluded.is_early, isolated_at = DEFAULT
)
SELECT pg_current_snapshot()::text, coalesce(max(id), %(last)s), count(*)
FROM later;

-- :name isolated_records
-- Those noted after `number`, oldest first, with the last number and the count of all of them.  A row that was deleted,
-- corrected, or sequenced after all is no longer isolated.
SELECT i.record_id, i.channel, i.shard, i.reason, max(i.number) OVER (), count(*) OVER ()
FROM {schema}.isolated_records i
JOIN {schema}.staged_records r ON r.id = i.record_id AND r.xid = i.xid
WHERE i.number > %(number)s
  AND NOT (i.is_early AND pg_visible_in_snapshot(i.xid, (SELECT snapshot FROM {schema}.ticks ORDER BY tick DESC LIMIT 1)))
ORDER BY i.number
LIMIT %(limit)s;

-- :name forget_isolated
DELETE FROM {schema}.isolated_records i
WHERE NOT EXISTS (SELECT FROM {schema}.staged_records r WHERE r.id = i.record_id AND r.xid = i.xid)
   OR i.is_early AND pg_visible_in_snapshot(i.xid, (SELECT snapshot FROM {schema}.ticks ORDER BY tick DESC LIMIT 1));

-- :name unknown_shards
-- Shards in the journal that no registered channel has, with the number of records and the first of these: at most `limit`.
-- Each step jumps to the next shard of the journal, or over all shards of a registered channel.
WITH RECURSIVE known AS (
    SELECT channel, first_shard + coalesce(generations[cardinality(generations)], shards) - 1 AS last_shard
    FROM {schema}.channels
),
steps AS (
    (SELECT channel, shard FROM {schema}.journal ORDER BY channel, shard LIMIT 1)
    UNION ALL
    SELECT next.channel, next.shard
    FROM steps
    LEFT JOIN known ON known.channel = steps.channel AND steps.shard BETWEEN 0 AND last_shard
    CROSS JOIN LATERAL (
        SELECT channel, shard
        FROM {schema}.journal j
        WHERE (j.channel, j.shard) > (steps.channel, coalesce(last_shard, steps.shard))
        ORDER BY channel, shard
        LIMIT 1
    ) next
)
SELECT channel, shard, bounds.last_offset - bounds.first_offset + 1,
       (SELECT record_ids[1]
        FROM {schema}.journal j
        WHERE j.channel = steps.channel AND j.shard = steps.shard AND j.first_offset = bounds.first_offset)
FROM steps
CROSS JOIN LATERAL {schema}.journal_bounds(channel, shard) AS bounds
WHERE NOT EXISTS (
          SELECT FROM known WHERE known.channel = steps.channel AND steps.shard BETWEEN 0 AND last_shard
      )
LIMIT %(limit)s;

-- :name stop_shard
INSERT INTO {schema}.stopped_shards (channel, shard, reason)
VALUES (%(channel)s, %(shard)s, %(reason)s)
ON CONFLICT (channel, shard) DO UPDATE SET reason = excluded.reason;

-- :name start_shards
-- All but those named.
DELETE FROM {schema}.stopped_shards
WHERE channel || '/' || shard <> ALL (%(kept)s::text[]);

-- :name stopped_shards
SELECT channel, shard, reason, extract(epoch FROM clock_timestamp() - stopped_at)::float8
FROM {schema}.stopped_shards
ORDER BY channel, shard;

-- :name missed_in_shard
-- As `missed_records` of the journal, of those that were staged for one shard: once the number of shards was changed, the
-- journal has them in another.
SELECT count(*), min(r.id)
FROM {schema}.staged_records r
WHERE r.channel = %(channel)s
  AND r.shard = %(shard)s
  AND pg_visible_in_snapshot(r.xid, (SELECT snapshot FROM {schema}.ticks ORDER BY tick DESC LIMIT 1))
  AND NOT EXISTS (SELECT FROM {schema}.isolated_records known WHERE known.record_id = r.id)
  AND r.id NOT IN (
          SELECT unnest(record_ids)
          FROM {schema}.journal
          WHERE channel = %(channel)s
            AND (shard = %(shard)s
                 OR EXISTS (SELECT FROM {schema}.channels WHERE channel = %(channel)s AND generations <> '{}'))
      )
  AND NOT EXISTS (SELECT FROM {schema}.waiting_records w WHERE w.record_id = r.id);

-- :name put_in_waiting
-- Records that wait until they are due.  Those that Redis was given already stay so: this is a replay.
INSERT INTO {schema}.waiting_records (record_id, channel, shard, due)
SELECT w.id, %(channel)s, %(shard)s, 'epoch'::timestamptz + w.due_ms * interval '1 millisecond' - %(near)s::interval
FROM unnest(%(ids)s::bigint[], %(dues)s::bigint[]) AS w (id, due_ms)
ON CONFLICT (record_id) DO NOTHING;

-- :name put_refused
-- Records that Redis has refused, and from when on it is asked again.
INSERT INTO {schema}.waiting_records AS known (record_id, channel, shard, tenant, due)
SELECT w.id, %(channel)s, %(shard)s, w.tenant, clock_timestamp() + %(pause)s::interval
FROM unnest(%(ids)s::bigint[], %(tenants)s::text[]) AS w (id, tenant)
ON CONFLICT (record_id) DO UPDATE
SET tenant = excluded.tenant, due = excluded.due, is_given = false;

-- :name put_missing
-- Records that Redis should have, and does not: it is given them at once.
INSERT INTO {schema}.waiting_records AS known (record_id, channel, shard)
SELECT w.id, %(channel)s, %(shard)s
FROM unnest(%(ids)s::bigint[]) AS w (id)
ON CONFLICT (record_id) DO UPDATE
SET is_given = false
WHERE known.is_given;

-- :name due_records
-- Waiting records that Redis is to be given, the first due first.  One that is done has only its id.
-- statement_timestamp, because an index cannot be searched for the volatile clock_timestamp.  As a batch of `unpublished`, they end
-- early once their payloads exceed the byte limit.
SELECT record_id, id, key, action, object,
       data::text,
       coalesce(headers::text, ''),
       (extract(epoch FROM created_at) * 1000000)::bigint
FROM (
    SELECT w.record_id, w.due, r.id, r.key, r.action, r.object, r.data, r.headers, r.created_at,
           sum(coalesce(pg_column_size(r.data), 0)) OVER (
               ORDER BY w.due, w.record_id
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
           ) AS bytes_before
    FROM (
        SELECT record_id, due
        FROM {schema}.waiting_records
        WHERE channel = %(channel)s AND shard = %(shard)s AND NOT is_given AND tenant IS NULL
          AND due <= statement_timestamp()
        ORDER BY due
        LIMIT %(records)s
    ) w
    LEFT JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = w.record_id OFFSET 0) r ON true
) measured
WHERE coalesce(bytes_before, 0) < %(bytes)s
ORDER BY due, record_id;

-- :name refused_tenants
-- Tenants that had no room, at most `tenants` after one of them: one probe of the index for each.
WITH RECURSIVE tenants AS (
    (SELECT tenant, 1 AS number
     FROM {schema}.waiting_records
     WHERE channel = %(channel)s AND shard = %(shard)s AND NOT is_given AND tenant > %(after)s
     ORDER BY tenant
     LIMIT 1)
    UNION ALL
    SELECT next.tenant, tenants.number + 1
    FROM tenants
    CROSS JOIN LATERAL (
        SELECT tenant
        FROM {schema}.waiting_records
        WHERE channel = %(channel)s AND shard = %(shard)s AND NOT is_given AND tenant > tenants.tenant
        ORDER BY tenant
        LIMIT 1
    ) next
    WHERE tenants.number < %(tenants)s
)
SELECT tenant
FROM tenants
ORDER BY tenant;

-- :name refused_records
-- The first waiting records of each of these tenants.
SELECT record_id, id, tenant, action, object,
       data::text,
       coalesce(headers::text, ''),
       (extract(epoch FROM created_at) * 1000000)::bigint
FROM (
    SELECT w.record_id, tenants.tenant, r.id, r.action, r.object, r.data, r.headers, r.created_at,
           sum(coalesce(pg_column_size(r.data), 0)) OVER (
               ORDER BY tenants.tenant, w.record_id
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
           ) AS bytes_before
    FROM unnest(%(tenants)s::text[]) AS tenants (tenant)
    CROSS JOIN LATERAL (
        SELECT record_id
        FROM {schema}.waiting_records
        WHERE channel = %(channel)s AND shard = %(shard)s AND NOT is_given AND tenant = tenants.tenant
        ORDER BY record_id
        LIMIT %(records)s
    ) w
    LEFT JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = w.record_id OFFSET 0) r ON true
) measured
WHERE coalesce(bytes_before, 0) < %(bytes)s
ORDER BY tenant, record_id;

-- :name note_given
UPDATE {schema}.waiting_records
SET is_given = true, tenant = NULL
WHERE record_id = ANY (%(ids)s::bigint[]);

-- :name note_lost
-- Redis came back without the queue: everything is to be given again.
UPDATE {schema}.waiting_records
SET is_given = false, due = least(due, clock_timestamp())
WHERE channel = %(channel)s AND shard = %(shard)s AND is_given;

-- :name forget_waiting
DELETE FROM {schema}.waiting_records
WHERE record_id = ANY (%(ids)s::bigint[]);

-- :name finish_duplicates
-- Records whose unique name another has, unless that other one is done: then its time is over, and Redis just does not know.
-- A name that is held for a time is held whatever becomes of its holder, unless that was cancelled, and has no effect.
-- A restored Postgres gives ids out again: a record of another time, or a holder that has no such name, is another record.
-- One that was cancelled while a worker was at it may yet have no effect: then the record is the one that replaces it.
-- A dead letter that was staged again is no duplicate: it waits until the name is free.
DELETE FROM {schema}.staged_records r
USING unnest(%(ids)s::bigint[], %(staged_us)s::bigint[], %(names)s::text[], %(holders)s::bigint[], %(in_window)s::boolean[])
    AS d (id, staged_us, name, holder, in_window)
WHERE r.id = d.id AND r.channel = %(channel)s
  AND (extract(epoch FROM r.created_at) * 1000000)::bigint = d.staged_us
  AND r.headers -> %(reserved)s::text -> 'again' IS NULL
  AND CASE
          WHEN d.holder IS NULL THEN true
          WHEN d.in_window THEN NOT EXISTS (
              SELECT
              FROM {schema}.cancellations c
              WHERE c.record_id = d.holder AND c.channel = %(channel)s
                AND (c.has_no_effect OR EXISTS (SELECT FROM {schema}.staged_records h WHERE h.id = c.record_id))
          )
          ELSE EXISTS (
              SELECT
              FROM {schema}.staged_records h
              WHERE h.id = d.holder AND h.channel = %(channel)s
                AND h.headers -> %(reserved)s::text -> 'unique' ->> 'name' = d.name
                AND NOT EXISTS (SELECT FROM {schema}.cancellations c WHERE c.record_id = h.id)
          )
      END
RETURNING r.id;

-- :name take_cancelled
-- A page of cancelled jobs that are done with: who had their rows locked has left them, or finished them.  Those that Redis forgot
-- long ago are forgotten here, too.
WITH page AS MATERIALIZED (
    SELECT record_id
    FROM {schema}.cancellations
    WHERE channel = %(channel)s AND shard = %(shard)s AND forgotten_at IS NULL
    ORDER BY record_id
    LIMIT %(records)s
),
old AS (
    DELETE FROM {schema}.cancellations
    WHERE record_id = ANY (ARRAY(
              SELECT record_id
              FROM {schema}.cancellations
              WHERE channel = %(channel)s AND shard = %(shard)s AND forgotten_at < statement_timestamp() - %(keep)s::interval
              ORDER BY forgotten_at
              LIMIT %(records)s
          ))
),
running AS MATERIALIZED (
    SELECT c.job
    FROM (SELECT array_agg(record_id) AS ids FROM page HAVING count(*) > 0) p,  -- as a rule there is none, and no call
         LATERAL {schema}.cancel_jobs(%(channel)s, p.ids, NULL, NULL) c
    WHERE c.is_running
),
waiting AS (
    DELETE FROM {schema}.waiting_records
    WHERE record_id IN (SELECT record_id FROM page) AND record_id NOT IN (SELECT job FROM running)
)
SELECT record_id
FROM page
WHERE record_id NOT IN (SELECT job FROM running);

-- :name forget_cancelled
UPDATE {schema}.cancellations
SET forgotten_at = clock_timestamp()
WHERE record_id = ANY (%(ids)s::bigint[]);

-- :name claim_names
-- Gives unique names to records, the first of each name, where no other has it, or has released it.  In the order of the names, so that
-- two streamers do not wait for each other.
INSERT INTO {schema}.unique_names AS held (channel, name, record_id, shard, is_queued, ends)
SELECT DISTINCT ON (c.name)
       %(channel)s, c.name, c.id, %(shard)s, c.is_queued, clock_timestamp() + c.window_ms * interval '1 millisecond'
FROM unnest(%(names)s::text[], %(ids)s::bigint[], %(are_queued)s::boolean[], %(windows)s::bigint[])
     WITH ORDINALITY AS c (name, id, is_queued, window_ms, number)
ORDER BY c.name, c.number
ON CONFLICT (channel, name) DO UPDATE
SET record_id = excluded.record_id, shard = excluded.shard, is_queued = excluded.is_queued, ends = excluded.ends
WHERE held.record_id <> excluded.record_id
  AND CASE
          WHEN held.ends IS NOT NULL THEN
              held.ends <= clock_timestamp()
              OR EXISTS (
                     SELECT
                     FROM {schema}.cancellations c
                     WHERE c.record_id = held.record_id AND c.channel = held.channel AND c.has_no_effect
                 )
          ELSE held.record_id = ANY (%(released)s::bigint[])
               OR NOT EXISTS (SELECT FROM {schema}.staged_records r WHERE r.id = held.record_id)
      END;

-- :name name_holders
SELECT name, record_id, shard, is_queued, ends IS NOT NULL
FROM {schema}.unique_names
WHERE channel = %(channel)s AND name = ANY (%(names)s::text[]);

-- :name held_windows
-- Names that are held for a time, also since before Redis was lost.
SELECT u.name, u.record_id
FROM {schema}.unique_names u
WHERE u.channel = %(channel)s AND u.name = ANY (%(names)s::text[]) AND u.ends > clock_timestamp()
  AND NOT EXISTS (
      SELECT
      FROM {schema}.cancellations c
      WHERE c.record_id = u.record_id AND c.channel = u.channel AND c.has_no_effect
  );

-- :name forget_names
-- Of a page of names, those that nobody has any more; returns the last name of the page, null after the last page.
WITH page AS (
    SELECT name, record_id, ends
    FROM {schema}.unique_names
    WHERE channel = %(channel)s AND name > %(after)s
    ORDER BY name
    LIMIT %(records)s
),
forgotten AS (
    DELETE FROM {schema}.unique_names u
    USING page
    WHERE u.channel = %(channel)s AND u.name = page.name AND u.record_id = page.record_id
      AND CASE
              WHEN page.ends IS NOT NULL THEN
                  page.ends <= clock_timestamp()
                  OR EXISTS (
                         SELECT
                         FROM {schema}.cancellations c
                         WHERE c.record_id = page.record_id AND c.channel = u.channel AND c.has_no_effect
                     )
              ELSE NOT EXISTS (SELECT FROM {schema}.staged_records r WHERE r.id = page.record_id)
          END
)
SELECT CASE WHEN count(*) = %(records)s THEN max(name) END
FROM page;

-- :name outstanding_journaled
-- A page of the journal after an offset: its last row, and the records in it that are not done and do not wait.
WITH entries AS MATERIALIZED (
    SELECT first_offset, record_ids
    FROM (
        SELECT first_offset, record_ids,
               sum(last_offset - first_offset + 1) OVER (
                   ORDER BY first_offset
                   ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
               ) AS records_before
        FROM {schema}.journal
        WHERE channel = %(channel)s AND shard = %(shard)s
          AND first_offset > %(after)s AND last_offset <= %(tail)s
        ORDER BY first_offset
        LIMIT %(records)s
    ) page
    WHERE coalesce(records_before, 0) < %(records)s
)
SELECT (SELECT max(first_offset) FROM entries),
       ARRAY(
           SELECT n.id
           FROM entries
           CROSS JOIN LATERAL unnest(entries.record_ids) AS n (id)
           CROSS JOIN LATERAL (SELECT FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r
           WHERE NOT EXISTS (SELECT FROM {schema}.waiting_records w WHERE w.record_id = n.id)
       );

-- :name given_records
-- A page of the waiting records that Redis was given: id, and whether it is outstanding still.
SELECT w.record_id, r.id IS NOT NULL
FROM (
    SELECT record_id
    FROM {schema}.waiting_records
    WHERE channel = %(channel)s AND shard = %(shard)s AND is_given AND record_id > %(after)s
    ORDER BY record_id
    LIMIT %(records)s
) w
LEFT JOIN LATERAL (SELECT id FROM {schema}.staged_records WHERE id = w.record_id OFFSET 0) r ON true
ORDER BY w.record_id;

-- :name queue_limits_version
-- Another one after each change: a row that is written has the number of a transaction that no row had before.
SELECT count(*), sum(xmin::text::bigint)
FROM {schema}.queue_limits;

-- :name trim_queue
-- As `remove_passed`, of a queue: its records stay until they are done, and those that are not move to the waiting ones, so
-- that Redis can be given them again.
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
           ) AS records_before
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
      AND first_offset <= (SELECT max(first_offset) FROM passed WHERE coalesce(records_before, 0) < %(records)s)
      AND created_at < statement_timestamp() - %(keep)s::interval
    RETURNING first_offset, last_offset, record_ids
),
moved AS (
    INSERT INTO {schema}.waiting_records (record_id, channel, shard, is_given)
    SELECT n.id, %(channel)s, %(shard)s, true
    FROM entries
    CROSS JOIN LATERAL unnest(entries.record_ids) AS n (id)
    CROSS JOIN LATERAL (SELECT FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r
    ON CONFLICT (record_id) DO NOTHING
)
SELECT (SELECT coalesce(sum(last_offset - first_offset + 1), 0)::bigint FROM entries) AS journaled,
       0::bigint AS removed,
       (SELECT max(last_offset) FROM entries) AS last_offset;

-- :name groups_to_end
-- Groups whose member that was left last is gone.
SELECT g.name
FROM {schema}.job_groups g
LEFT JOIN LATERAL (SELECT id FROM {schema}.staged_records WHERE id = g.waits_for OFFSET 0) waited_for ON true
WHERE g.ended_at IS NULL AND waited_for.id IS NULL
ORDER BY random();  -- time is short, and those that cannot be ended are not always the first

-- :name end_groups
-- Of some groups, ends those without a member that is left; how many.  A member whose deletion is not committed is left.
WITH looked_at AS (
    SELECT g.name,
           (SELECT max(r.id) FROM {schema}.staged_records r WHERE r.id = ANY (g.members)) AS left_member
    FROM {schema}.job_groups g
    WHERE g.name = ANY (%(names)s::text[]) AND g.ended_at IS NULL
    FOR UPDATE OF g SKIP LOCKED
),
ended AS (
    UPDATE {schema}.job_groups g
    SET waits_for = coalesce(l.left_member, g.waits_for),
        ended_at = CASE WHEN l.left_member IS NULL THEN clock_timestamp() END
    FROM looked_at l
    WHERE g.name = l.name
    RETURNING g.ended_at IS NOT NULL AS has_ended, g.following
),
staged AS (
    INSERT INTO {schema}.staged_records (channel, shard, key, action, object, data, headers)
    SELECT following ->> 0, (following ->> 1)::integer, following ->> 2, following ->> 3, following ->> 4, following -> 5, following -> 6
    FROM ended
    WHERE has_ended AND following IS NOT NULL
)
SELECT count(*) FILTER (WHERE has_ended)
FROM ended;

-- :name remove_old_notes
-- Results, ended groups, and notes on jobs that are done, or dead letters: these longer, if an attempt has failed.  How many there were of
-- each.  The old ones alone are read, from their indexes: statement_timestamp(), because Postgres compares no index with clock_timestamp().
-- A group of a retired queue may have ended after that.
WITH queues AS (
    SELECT *
    FROM unnest(%(channels)s::text[], %(keep)s::interval[]) AS q (channel, keep)
    UNION ALL
    SELECT channel, %(attempts_kept)s::interval
    FROM {schema}.retired_channels
),
notes AS (
    DELETE FROM {schema}.job_notes
    WHERE record_id = ANY (ARRAY(
              SELECT old.record_id
              FROM queues
              CROSS JOIN LATERAL (
                  (
                      SELECT n.record_id
                      FROM {schema}.job_notes n
                      LEFT JOIN LATERAL (SELECT id FROM {schema}.staged_records WHERE id = n.record_id OFFSET 0) r ON true
                      WHERE n.channel = queues.channel AND n.attempts = '[]'
                        AND n.noted_at < statement_timestamp() - queues.keep
                        AND r.id IS NULL
                      ORDER BY n.noted_at
                      LIMIT %(limit)s
                  )
                  UNION ALL
                  (
                      SELECT n.record_id
                      FROM {schema}.job_notes n
                      LEFT JOIN LATERAL (SELECT id FROM {schema}.staged_records WHERE id = n.record_id OFFSET 0) r ON true
                      WHERE n.channel = queues.channel AND n.attempts <> '[]'
                        AND n.noted_at < statement_timestamp() - greatest(queues.keep, %(attempts_kept)s::interval)
                        AND r.id IS NULL
                      ORDER BY n.noted_at
                      LIMIT %(limit)s
                  )
              ) old
              LIMIT %(limit)s
          ))
    RETURNING record_id
),
results AS (
    DELETE FROM {schema}.job_results
    WHERE record_id = ANY (ARRAY(
              SELECT old.record_id
              FROM queues
              CROSS JOIN LATERAL (
                  SELECT record_id
                  FROM {schema}.job_results
                  WHERE channel = queues.channel AND done_at < statement_timestamp() - queues.keep
                  ORDER BY done_at
                  LIMIT %(limit)s
              ) old
              LIMIT %(limit)s
          ))
    RETURNING record_id
),
groups AS (
    DELETE FROM {schema}.job_groups
    WHERE name = ANY (ARRAY(
              SELECT old.name
              FROM queues
              CROSS JOIN LATERAL (
                  SELECT name
                  FROM {schema}.job_groups
                  WHERE channel = queues.channel AND ended_at < statement_timestamp() - queues.keep
                  ORDER BY ended_at
                  LIMIT %(limit)s
              ) old
              LIMIT %(limit)s
          ))
    RETURNING name
)
SELECT (SELECT count(*) FROM notes), (SELECT count(*) FROM results), (SELECT count(*) FROM groups);

-- :name new_troubles
-- Halts, new dead letters, stopped shards, those that wait for a server, and the epoch, without those that were reported.  Dead letters are counted by the
-- checkpoints, in the transaction that writes them: their times are not in the order of their commits.
WITH found AS (
    SELECT 'halted' AS kind, consumer, channel, shard, 1::bigint AS total, md5(halted) AS detail
    FROM {schema}.checkpoints
    WHERE halted IS NOT NULL
    UNION ALL
    SELECT 'dead-lettered', consumer, channel, NULL, sum(dead)::bigint, sum(dead)::text
    FROM {schema}.checkpoints
    WHERE reported_by IS NULL
    GROUP BY consumer, channel
    UNION ALL
    SELECT 'stopped', NULL, channel, shard, 1, md5(reason)
    FROM {schema}.stopped_shards
    UNION ALL
    SELECT 'waiting', consumer, channel, shard, 1, ''
    FROM {schema}.checkpoints
    WHERE waiting LIKE 'waiting for the server: %%' AND updated_at < clock_timestamp() - %(waiting_s)s * interval '1 second'
    UNION ALL
    SELECT 'epoch', NULL, NULL, NULL, max(epoch), max(epoch)::text
    FROM {schema}.epochs
)
SELECT f.kind, s.subject, f.detail, f.consumer, f.channel, f.shard,
       CASE WHEN f.kind = 'dead-lettered' THEN f.total - coalesce(t.detail::bigint, 0) ELSE f.total END AS count,
       t.kind IS NULL AS is_first
FROM found f
CROSS JOIN LATERAL (SELECT concat_ws(' ', f.consumer, f.channel, f.shard) AS subject) s
LEFT JOIN {schema}.troubles t ON t.kind = f.kind AND t.subject = s.subject
WHERE t.detail IS DISTINCT FROM f.detail
  AND NOT (f.kind = 'dead-lettered' AND f.total = 0 AND t.kind IS NULL)
ORDER BY f.kind, s.subject;

-- :name lock_troubles
-- One process reports at a time: the others look again later.
SELECT pg_try_advisory_xact_lock(hashtextextended('penstock troubles {schema}', 0));

-- :name note_trouble
INSERT INTO {schema}.troubles (kind, subject, detail)
VALUES (%(kind)s, %(subject)s, %(detail)s)
ON CONFLICT (kind, subject) DO UPDATE
SET detail = excluded.detail, reported_at = clock_timestamp();

-- :name forget_troubles
-- Those that have ended: they are reported again when they come back.
DELETE FROM {schema}.troubles t
WHERE t.kind = 'halted'
      AND NOT EXISTS (
              SELECT FROM {schema}.checkpoints c
              WHERE c.halted IS NOT NULL AND concat_ws(' ', c.consumer, c.channel, c.shard) = t.subject
          )
   OR t.kind = 'stopped'
      AND NOT EXISTS (
              SELECT FROM {schema}.stopped_shards s WHERE concat_ws(' ', s.channel, s.shard) = t.subject
          )
   OR t.kind = 'waiting'
      AND NOT EXISTS (
              SELECT FROM {schema}.checkpoints c
              WHERE c.waiting IS NOT NULL AND concat_ws(' ', c.consumer, c.channel, c.shard) = t.subject
          )
   OR t.kind = 'dead-lettered'
      AND NOT EXISTS (
              SELECT FROM {schema}.checkpoints c WHERE concat_ws(' ', c.consumer, c.channel) = t.subject
          );

-- :name read_schedules
-- All of them, though few are due: one whose next time is too late was moved on while this clock was ahead.  None that is paused.
SELECT name, channel, every, timezone, digest, next_at, last_at, clock_timestamp() AS now
FROM {schema}.schedules s
WHERE name = ANY (%(names)s) AND NOT EXISTS (SELECT FROM {schema}.pauses p WHERE (p.kind, p.name) = ('schedule', s.name));

-- :name declare_schedule
-- With other times than before, or another queue, it begins anew: what was missed was missed by another one.
INSERT INTO {schema}.schedules AS known (name, channel, every, timezone, digest, next_at)
VALUES (%(name)s, %(channel)s, %(every)s, %(timezone)s, %(digest)s, %(next_at)s)
ON CONFLICT (name) DO UPDATE
SET channel = EXCLUDED.channel, every = EXCLUDED.every, timezone = EXCLUDED.timezone, digest = EXCLUDED.digest,
    next_at = CASE
        WHEN (known.channel, known.every, known.timezone) = (EXCLUDED.channel, EXCLUDED.every, EXCLUDED.timezone)
        THEN known.next_at ELSE EXCLUDED.next_at
    END;

-- :name take_schedule
-- Its first slot that was not taken, and the time.  One streamer at a time; one of another release takes what it has declared itself.
SELECT next_at, clock_timestamp()
FROM {schema}.schedules
WHERE name = %(name)s AND (channel, every, timezone, digest) = (%(channel)s, %(every)s, %(timezone)s, %(digest)s)
  AND next_at <= clock_timestamp()
FOR UPDATE SKIP LOCKED;

-- :name move_schedule
UPDATE {schema}.schedules
SET next_at = %(next_at)s, last_at = coalesce(%(last_at)s, last_at),
    skipped_since = coalesce(%(skipped_since)s, skipped_since),
    skipped_until = coalesce(%(skipped_until)s, skipped_until)
WHERE name = %(name)s;

-- :name move_schedule_back
UPDATE {schema}.schedules
SET next_at = %(next_at)s
WHERE name = %(name)s AND next_at IS NOT DISTINCT FROM %(ahead)s;
