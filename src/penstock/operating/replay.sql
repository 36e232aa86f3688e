-- :name find_replay
-- The newest replay of a request, and how far its checkpoints are.
SELECT r.replay, r.shards, r.firsts, r.lasts, r.staged, r.since, r.until, r.ended_at,
       ARRAY(
           SELECT c."offset"
           FROM unnest(r.shards) WITH ORDINALITY AS s (shard, number)
           JOIN {schema}.checkpoints c
               ON c.consumer = 'replay-' || r.replay AND c.channel = r.channel AND c.shard = s.shard
           ORDER BY s.number
       )
FROM {schema}.replays r
WHERE r.channel = %(channel)s AND r.target = %(target)s AND r.request = %(request)s
ORDER BY r.replay DESC
LIMIT 1;

-- :name count_to_replay
-- The records of a range that a filter leaves.
SELECT count(*)
FROM {schema}.journal e
CROSS JOIN LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
CROSS JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = n.id OFFSET 0) r
WHERE e.channel = %(channel)s AND e.shard = %(shard)s
  AND e.last_offset >= %(first)s AND e.first_offset <= %(last)s
  AND e.first_offset + n.position - 1 BETWEEN %(first)s AND %(last)s
  AND r.key = coalesce(%(key)s::text, r.key)
  AND r.created_at >= coalesce(%(since)s::timestamptz, r.created_at)
  AND (%(until)s::timestamptz IS NULL OR r.created_at < %(until)s);

-- :name begin_replay
INSERT INTO {schema}.replays (request, channel, target, key, since, until, shards, firsts, lasts)
VALUES (%(request)s, %(channel)s, %(target)s, %(key)s, %(since)s, %(until)s, %(shards)s, %(firsts)s, %(lasts)s)
RETURNING replay;

-- :name register_replay
-- A checkpoint in each shard of the channel, as a consumer has: retention waits for it.  Shards that are not replayed are at their end.
INSERT INTO {schema}.checkpoints (consumer, channel, shard, "offset", epoch)
SELECT %(consumer)s, %(channel)s, s.shard, coalesce(r.first_offset - 1, journal.last_offset), (SELECT max(epoch) FROM {schema}.epochs)
FROM generate_series(0, %(count)s - 1) AS s (shard)
CROSS JOIN LATERAL {schema}.journal_bounds(%(channel)s, s.shard) AS journal
LEFT JOIN unnest(%(shards)s::int[], %(firsts)s::bigint[]) AS r (shard, first_offset) ON r.shard = s.shard;

-- :name lock_progress
-- A second process that carries out the same replay waits here for the end of this batch.
SELECT "offset"
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s
FOR UPDATE;

-- :name stage_batch
-- Stages copies of the next records of a shard, in their order, as rows of the target, whose kind decides what they are:
-- a queue takes the key as tenant, an Ick as member.  The shard is that of the key among those that are registered now.
-- Result: the last offset of the batch, its records, those of them that exist, those whose key a queue cannot take, the copies, and
-- whether the target is registered.
WITH batch AS MATERIALIZED (
    SELECT e.first_offset + n.position - 1 AS "offset", n.id
    FROM (
        SELECT first_offset, record_ids
        FROM {schema}.journal
        WHERE channel = %(channel)s AND shard = %(shard)s
          AND last_offset > %(after)s AND first_offset <= %(last)s
        ORDER BY first_offset
        LIMIT %(records)s
    ) e
    CROSS JOIN LATERAL unnest(e.record_ids) WITH ORDINALITY AS n (id, position)
    WHERE e.first_offset + n.position - 1 > %(after)s AND e.first_offset + n.position - 1 <= %(last)s
    ORDER BY 1
    LIMIT %(records)s
),
found AS MATERIALIZED (
    SELECT b."offset", r.*
    FROM batch b
    CROSS JOIN LATERAL (SELECT * FROM {schema}.staged_records WHERE id = b.id OFFSET 0) r
),
chosen AS MATERIALIZED (
    SELECT found.*, t.channel AS target, t.kind, t.shards,
           t.kind = 'queue' AND (octet_length(key) > 256 OR strpos(key, chr(1)) > 0) AS is_refused
    FROM found
    CROSS JOIN {schema}.channels t
    WHERE t.channel = %(target)s
      AND key = coalesce(%(key)s::text, key)
      AND created_at >= coalesce(%(since)s::timestamptz, created_at)
      AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s)
),
copies AS (
    INSERT INTO {schema}.staged_records (channel, shard, key, action, object, data, headers)
    SELECT target,
           mod(('x' || encode(substr(sha256(convert_to(key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint, shards),
           key,
           CASE kind WHEN 'ick' THEN 'dirty' ELSE action END,
           CASE kind WHEN 'ick' THEN 'member' ELSE object END,
           CASE kind WHEN 'ick' THEN '{}' ELSE data END,
           CASE jsonb_typeof(headers) WHEN 'object' THEN headers - 'penstock' ELSE '{}' END || jsonb_build_object(
               'replayed-from', jsonb_build_object(
                   'replay', %(replay)s::bigint, 'channel', %(channel)s::text, 'shard', %(shard)s::int, 'offset', "offset", 'id', id,
                   'staged_us', (extract(epoch FROM created_at) * 1000000)::bigint
               )
           )
    FROM chosen
    WHERE NOT is_refused
    ORDER BY "offset"
    RETURNING 1
)
SELECT (SELECT max("offset") FROM batch), (SELECT count(*) FROM batch), (SELECT count(*) FROM found),
       (SELECT count(*) FROM chosen WHERE is_refused), (SELECT count(*) FROM copies),
       EXISTS (SELECT FROM {schema}.channels WHERE channel = %(target)s);

-- :name note_progress
WITH moved AS (
    UPDATE {schema}.checkpoints
    SET "offset" = %(offset)s, applied = applied + %(copies)s, updated_at = clock_timestamp()
    WHERE consumer = %(consumer)s AND channel = %(channel)s AND shard = %(shard)s
)
UPDATE {schema}.replays
SET staged = staged + %(copies)s
WHERE replay = %(replay)s;

-- :name end_replay
WITH checkpoints AS (
    DELETE FROM {schema}.checkpoints
    WHERE consumer = %(consumer)s AND channel = %(channel)s
)
UPDATE {schema}.replays
SET ended_at = clock_timestamp()
WHERE replay = %(replay)s AND ended_at IS NULL;
