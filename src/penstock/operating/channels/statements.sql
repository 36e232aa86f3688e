-- :name list_channels
-- The registered channels, with what the journal has of them and the names that they had before.
SELECT c.channel, c.kind, (c.shards || c.generations)[1 + cardinality(c.generations)], extract(epoch FROM c.keep)::float8, c.entries,
       (SELECT coalesce(sum(last_offset - first_offset + 1), 0)::bigint
        FROM {schema}.journal j
        WHERE j.channel = c.channel),
       ARRAY(SELECT DISTINCT consumer FROM {schema}.checkpoints k WHERE k.channel = c.channel ORDER BY consumer),
       ARRAY(SELECT f.channel FROM {schema}.former_channels f WHERE f.successor = c.channel ORDER BY f.channel)
FROM {schema}.channels c
ORDER BY c.channel;

-- :name former_channel
SELECT successor
FROM {schema}.former_channels
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
        WHERE r.channel IN (SELECT %(channel)s UNION ALL SELECT channel FROM {schema}.former_channels WHERE successor = %(channel)s)
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

-- :name outstanding_jobs
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
former AS (
    UPDATE {schema}.former_channels
    SET successor = NULL
    WHERE successor = %(channel)s
),
registered AS (
    DELETE FROM {schema}.channels
    WHERE channel = %(channel)s
)
INSERT INTO {schema}.former_channels (channel)
VALUES (%(channel)s)
ON CONFLICT (channel) DO UPDATE SET successor = NULL;

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
DELETE FROM {schema}.waiting_records
WHERE channel = %(channel)s;

-- :name remove_staged
-- What is left: records that no journal row names (any more).
DELETE FROM {schema}.staged_records
WHERE channel = %(channel)s;

-- :name adopt_channel
DELETE FROM {schema}.former_channels
WHERE channel = %(channel)s;

-- :name triggers_of_one_rule
-- Triggers that would stage the same changes for one channel: of one table and one object, each by a name that the channel has,
-- had or gets.  A trigger's function names its channel and its object as `trigger_text` writes them.
SELECT format('%%I.%%I', n.nspname, c.relname), array_agg(rule.function ORDER BY rule.channel = quote_literal(%(successor)s::text), rule.function)
FROM (
    SELECT t.tgrelid, p.proname AS function,
           substring(p.prosrc FROM '\n    VALUES \(\n        (''[^'']*''),\n        mod\(') AS channel,
           substring(p.prosrc FROM 'lower\(TG_OP\),\n        ([^ ][^\n]*),\n') AS object
    FROM pg_trigger t
    JOIN pg_proc p ON p.oid = t.tgfoid
    JOIN pg_namespace own ON own.oid = p.pronamespace
    WHERE own.nspname = %(schema)s AND p.proname LIKE 'stage\_%%' AND p.proname = t.tgname
      AND t.tgparentid = 0 AND t.tgenabled <> 'D'
) rule
JOIN pg_class c ON c.oid = rule.tgrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE rule.channel IN (
          SELECT quote_literal(%(channel)s::text)
          UNION ALL
          SELECT quote_literal(%(successor)s::text)
          UNION ALL
          SELECT quote_literal(f.channel) FROM {schema}.former_channels f WHERE f.successor = %(channel)s
      )
GROUP BY n.nspname, c.relname, rule.object
HAVING count(*) > 1
LIMIT 1;

-- :name name_is_used
-- Whether a name is registered, and how many records the journal has of it.
SELECT EXISTS (SELECT FROM {schema}.channels c WHERE c.channel = %(channel)s),
       (SELECT coalesce(sum(last_offset - first_offset + 1), 0)::bigint FROM {schema}.journal j WHERE j.channel = %(channel)s);

-- :name under_way
-- What names the channel and cannot be renamed while it runs: a reconciliation; a replay from it or into it, unless it was
-- cancelled, which removes its checkpoints.
SELECT (SELECT min(consumer) FROM {schema}.barriers WHERE channel = %(channel)s AND expires_at > clock_timestamp()),
       replays.replay,
       replays.channel || ' to ' || replays.target
FROM (SELECT) one
LEFT JOIN LATERAL (
    SELECT r.replay, r.channel, r.target
    FROM {schema}.replays r
    WHERE %(channel)s IN (r.channel, r.target) AND r.ended_at IS NULL
      AND EXISTS (SELECT FROM {schema}.checkpoints c WHERE c.consumer = 'replay-' || r.replay AND c.channel = r.channel)
    ORDER BY r.replay
    LIMIT 1
) replays ON true;

-- :name free_name
-- The name of a channel that has no records, or that the renamed one had before.
WITH checkpoints AS (
    DELETE FROM {schema}.checkpoints
    WHERE channel = %(successor)s
),
stopped AS (
    DELETE FROM {schema}.stopped_shards
    WHERE channel IN (%(channel)s, %(successor)s)
),
barriers AS (
    DELETE FROM {schema}.barriers
    WHERE channel IN (%(channel)s, %(successor)s)
),
former AS (
    DELETE FROM {schema}.former_channels
    WHERE channel = %(successor)s
)
DELETE FROM {schema}.channels
WHERE channel = %(successor)s;

-- :name rename_channel
-- Everything that names the channel, but staged records: they are looked for by all names, or see `follow_renames`.
WITH journal AS (
    UPDATE {schema}.journal
    SET channel = %(successor)s
    WHERE channel = %(channel)s
),
checkpoints AS (
    UPDATE {schema}.checkpoints
    SET channel = %(successor)s
    WHERE channel = %(channel)s
),
letters AS (
    UPDATE {schema}.dead_letters
    SET channel = %(successor)s
    WHERE channel = %(channel)s
),
waiting AS (
    UPDATE {schema}.waiting_records
    SET channel = %(successor)s
    WHERE channel = %(channel)s
),
isolated AS (
    UPDATE {schema}.isolated_records
    SET channel = %(successor)s
    WHERE channel = %(channel)s
),
replays AS (
    UPDATE {schema}.replays
    SET channel = CASE channel WHEN %(channel)s THEN %(successor)s ELSE channel END,
        target = CASE target WHEN %(channel)s THEN %(successor)s ELSE target END
    WHERE %(channel)s IN (channel, target)
),
former AS (
    UPDATE {schema}.former_channels
    SET successor = %(successor)s
    WHERE successor = %(channel)s
),
left_behind AS (
    INSERT INTO {schema}.former_channels (channel, successor)
    VALUES (%(channel)s, %(successor)s)
)
UPDATE {schema}.channels
SET channel = %(successor)s
WHERE channel = %(channel)s;
