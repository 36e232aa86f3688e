-- :name register_channel
INSERT INTO {schema}.channels AS known (channel, kind, shards, keep)
VALUES (%(channel)s, %(kind)s, %(shards)s, %(keep)s)
ON CONFLICT (channel) DO UPDATE
SET keep = excluded.keep
WHERE known.keep <> excluded.keep;

-- :name registered_channels
SELECT channel AS name, kind, shards, keep
FROM {schema}.channels
ORDER BY channel;

-- :name lock_channel
-- Retention and the registration of a consumer exclude each other by this row.
SELECT
FROM {schema}.channels
WHERE channel = %(channel)s
FOR UPDATE;

-- :name register_consumer
-- `earliest` is where the journal begins: older records are gone for everyone.
INSERT INTO {schema}.checkpoints (consumer, channel, shard, "offset", epoch)
SELECT %(consumer)s, %(channel)s, s.shard,
       CASE WHEN %(latest)s THEN journal.last_offset ELSE journal.first_offset - 1 END,
       (SELECT max(epoch) FROM {schema}.epochs)
FROM unnest(%(shards)s::int[]) AS s (shard),
     LATERAL {schema}.journal_bounds(%(channel)s, s.shard) AS journal
ON CONFLICT (consumer, channel, shard) DO NOTHING;

-- :name version_tables
-- Version tables of Alembic that may name the revision of the schema: its own first, and none of another Penstock schema.
SELECT pg_catalog.format('%%I.%%I', n.nspname, c.relname), n.nspname = %(schema)s AS is_own
FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE a.attname = 'version_num' AND c.relkind IN ('r', 'p') AND n.nspname NOT LIKE 'pg\_%%'
  AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
  AND EXISTS (
      SELECT
      FROM pg_catalog.pg_class s
      JOIN pg_catalog.pg_namespace o ON o.oid = s.relnamespace
      WHERE s.relname = 'staged_records' AND o.nspname = %(schema)s
  )
  AND (n.nspname = %(schema)s OR NOT EXISTS (
      SELECT
      FROM pg_catalog.pg_class s
      WHERE s.relname = 'staged_records' AND s.relnamespace = n.oid
  ))
ORDER BY 2 DESC, 1;

-- :name has_tables
SELECT EXISTS (
    SELECT
    FROM pg_catalog.pg_class s
    JOIN pg_catalog.pg_namespace n ON n.oid = s.relnamespace
    WHERE s.relname = 'staged_records' AND n.nspname = %(schema)s
);

-- :name lock_migrations
-- The lock that migrations take: two that replace one function at once fail.
SELECT pg_advisory_xact_lock(hashtextextended('penstock migrations', 0));

-- :name triggers
-- Functions that capture changes, each with its triggers.  Those of partitions are clones of their parent's.
SELECT p.proname, p.prosrc, t.tgname, n.nspname, c.relname, t.tgtype,
       t.tgenabled IN ('O', 'A') AND t.tgattr::text = '' AND t.tgqual IS NULL
FROM pg_proc p
JOIN pg_namespace own ON own.oid = p.pronamespace
LEFT JOIN pg_trigger t ON t.tgfoid = p.oid AND t.tgparentid = 0
LEFT JOIN pg_class c ON c.oid = t.tgrelid
LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE own.nspname = %(schema)s AND p.prorettype = 'trigger'::regtype AND p.proname LIKE 'stage\_%%'
ORDER BY p.proname, t.tgname;
