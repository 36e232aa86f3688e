-- :name hold_sequencers
-- Other sequencers wait for our tick to commit, then make the next one.  Taken before the snapshot, so that no other
-- tick comes between the two, whatever the load.  Producers do not touch this table.
LOCK TABLE {schema}.ticks IN SHARE ROW EXCLUSIVE MODE;

-- :name place_barrier
-- In the transaction of the cut's tick: no record beyond the barrier has an offset before the barrier exists.
INSERT INTO {schema}.barriers (consumer, channel, shard, "offset", run, expires_at)
SELECT %(consumer)s, %(channel)s, b.shard, b."offset", %(run)s, clock_timestamp() + make_interval(secs => %(seconds)s)
FROM unnest(%(shards)s::int[], %(offsets)s::bigint[]) AS b (shard, "offset");

-- :name extend_barrier
UPDATE {schema}.barriers
SET expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
WHERE run = %(run)s;

-- :name lift_barrier
-- Also removes barriers that expired an hour ago: their runs have died.
DELETE FROM {schema}.barriers
WHERE run = %(run)s OR expires_at < clock_timestamp() - interval '1 hour';

-- :name checkpoints_with_halts
SELECT shard, "offset", halted,
       EXISTS (SELECT FROM {schema}.dead_letters WHERE consumer = %(consumer)s AND channel = %(channel)s)
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND channel = %(channel)s
ORDER BY shard;

-- :name lock_positions
-- Everybody locks checkpoints in this order, which excludes deadlocks.
SELECT shard, "offset"
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s AND channel = %(channel)s
ORDER BY shard
FOR UPDATE;

-- :name first_offsets
SELECT s.shard, journal.first_offset
FROM {schema}.channels c,
     LATERAL generate_series(0, first_shard + coalesce(generations[cardinality(generations)], shards) - 1) AS s (shard),
     LATERAL {schema}.journal_bounds(c.channel, s.shard) AS journal
WHERE c.channel = %(channel)s;

-- :name put_checkpoints
-- State and position are replaced together; a halted shard resumes.  Records between the old and the new position are in
-- the state without having been applied, and count as skipped.
UPDATE {schema}.checkpoints c
SET "offset" = p."offset", skipped = skipped + greatest(0, p."offset" - c."offset"), epoch = %(epoch)s, halted = NULL, updated_at = clock_timestamp()
FROM unnest(%(shards)s::int[], %(offsets)s::bigint[]) AS p (shard, "offset")
WHERE c.consumer = %(consumer)s AND c.channel = %(channel)s AND c.shard = p.shard;

-- :name begin_run
INSERT INTO {schema}.reconciliations (name, consumer, intent, engine)
VALUES (%(name)s, %(consumer)s, %(intent)s, %(engine)s)
RETURNING id;

-- :name end_run
UPDATE {schema}.reconciliations
SET tick = %(tick)s, compared = %(compared)s, missing = %(missing)s, surplus = %(surplus)s, different = %(different)s,
    repaired = %(repaired)s, paused_s = %(paused_s)s, outcome = %(outcome)s, ended_at = clock_timestamp()
WHERE id = %(run)s;

-- :name keep_remaining
UPDATE {schema}.reconciliations
SET remaining = CASE WHEN id = %(run)s THEN %(keys)s::text[] END
WHERE id = %(run)s OR (name = %(name)s AND id < %(run)s AND remaining IS NOT NULL);

-- :name drop_remaining
UPDATE {schema}.reconciliations r
SET repaired = %(repaired)s,
    remaining = ARRAY(
        SELECT l.key
        FROM unnest(r.remaining) WITH ORDINALITY AS l (key, n)
        WHERE NOT EXISTS (SELECT FROM unnest(%(keys)s::text[]) AS done (key) WHERE done.key = l.key)
        ORDER BY l.n
    )
WHERE r.id = %(run)s;

-- :name take_over_remaining
-- A second run that does so at the same time waits here, and finds none.
WITH interrupted AS (
    SELECT id, engine, remaining
    FROM {schema}.reconciliations
    WHERE name = %(name)s AND id < %(run)s AND cardinality(remaining) > 0
    ORDER BY id DESC
    LIMIT 1
    FOR UPDATE
),
moved AS (
    UPDATE {schema}.reconciliations r
    SET remaining = CASE WHEN r.id = %(run)s THEN i.remaining END
    FROM interrupted i
    WHERE r.id IN (i.id, %(run)s)
)
SELECT id, engine, remaining
FROM interrupted;

-- :name last_runs
SELECT DISTINCT ON (name)
       name, consumer, intent, outcome, begun_at,
       extract(epoch FROM clock_timestamp() - begun_at)::float8 AS ago_s,
       extract(epoch FROM ended_at - begun_at)::float8 AS seconds,
       compared, missing + surplus + different AS differences, repaired, paused_s,
       coalesce(cardinality(remaining), 0) AS remaining
FROM {schema}.reconciliations
ORDER BY name, id DESC;

-- :name differences
CREATE TEMPORARY TABLE penstock_differences (
    number   integer NOT NULL,
    kind     text    NOT NULL,
    key      jsonb   NOT NULL,
    expected jsonb,
    before   jsonb,
    after    jsonb
) ON COMMIT DROP;

-- :name note_repairs
INSERT INTO {schema}.repairs (reconciliation, key, kind, before, after)
SELECT %(run)s, key, kind, before, after
FROM pg_temp.penstock_differences
WHERE number <> ALL (%(left)s::int[])
ORDER BY number;

-- :name dead_letters_before
SELECT count(*)
FROM {schema}.dead_letters l
JOIN unnest(%(shards)s::int[], %(offsets)s::bigint[]) AS p (shard, "offset") ON p.shard = l.shard
WHERE l.consumer = %(consumer)s AND l.channel = %(channel)s AND l."offset" <= p."offset";

-- :name drop_dead_letters
-- The canonical rows contain the changes of these records: retried, they would be applied twice.
DELETE FROM {schema}.dead_letters l
USING unnest(%(shards)s::int[], %(offsets)s::bigint[]) AS p (shard, "offset")
WHERE p.shard = l.shard AND l.consumer = %(consumer)s AND l.channel = %(channel)s AND l."offset" <= p."offset";

-- :name records_seen
SELECT coalesce(sum(applied + skipped + dead), 0)::bigint
FROM {schema}.checkpoints
WHERE consumer = %(consumer)s;

-- :name find_table
-- By the role's search_path, so the function is named with its schema.
SELECT pg_catalog.to_regclass(%(table)s)::pg_catalog.oid;

-- :name row_bytes
-- By the statistics; null without any.
SELECT (pg_table_size(oid) / nullif(greatest(reltuples, 0), 0))::bigint
FROM pg_class
WHERE oid = %(table)s::oid;

-- :name state_columns
-- The columns of a table.  Of a domain, ``limited`` and ``unlimited`` are the type below it: with its length, precision
-- or scale, and without.  A length (``is_sized``) truncates in a cast, and refuses in an assignment.
WITH RECURSIVE base AS (
    SELECT attnum, atttypid AS type, atttypmod AS modifier
    FROM pg_catalog.pg_attribute
    WHERE attrelid = %(table)s::pg_catalog.oid AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT b.attnum, t.typbasetype, t.typtypmod
    FROM base b
    JOIN pg_catalog.pg_type t ON t.oid = b.type
    WHERE t.typtype = 'd'
)
SELECT a.attname AS name,
       pg_catalog.format_type(b.type, b.modifier) AS limited,
       pg_catalog.format_type(b.type, -1) AS unlimited,
       b.type::pg_catalog.int8 AS oid,
       t.typcategory = 'S' AS is_text,
       b.modifier >= 0 AND CASE t.typcategory WHEN 'A' THEN t.typelem ELSE t.oid END
           = ANY ('{1042,1043,1560,1562}'::pg_catalog.oid[]) AS is_sized,  -- char, varchar, bit, varbit
       a.attgenerated <> '' AS is_generated,
       a.attidentity = 'a' AS is_identity
FROM base b
JOIN pg_catalog.pg_type t ON t.oid = b.type AND t.typtype <> 'd'
JOIN pg_catalog.pg_attribute a ON a.attrelid = %(table)s::pg_catalog.oid AND a.attnum = b.attnum
ORDER BY a.attnum;

-- :name references
-- Foreign keys that refer to a table or to one of its partitions, each once.
WITH RECURSIVE tree AS (
    SELECT %(table)s::oid AS oid
    UNION
    SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
),
referring AS (
    SELECT c.* FROM pg_constraint c JOIN tree ON tree.oid = c.confrelid
    WHERE coalesce((to_jsonb(c) ->> 'conenforced')::boolean, true)
)
SELECT c.conname AS constraint_name, c.conrelid::int8 AS child, n.nspname AS child_schema, r.relname AS child_table,
       c.conrelid IN (SELECT oid FROM tree) AS is_self, c.condeferrable AS is_deferrable,
       c.confdeltype::text AS on_delete, c.confupdtype::text AS on_update,
       ARRAY(SELECT attname::text FROM unnest(c.conkey) WITH ORDINALITY k (num, place)
             JOIN pg_attribute ON attrelid = c.conrelid AND attnum = k.num ORDER BY place) AS columns,
       ARRAY(SELECT attname::text FROM unnest(c.confkey) WITH ORDINALITY k (num, place)
             JOIN pg_attribute ON attrelid = c.confrelid AND attnum = k.num ORDER BY place) AS referenced
FROM referring c
JOIN pg_class r ON r.oid = c.conrelid
JOIN pg_namespace n ON n.oid = r.relnamespace
WHERE NOT EXISTS (SELECT FROM referring p WHERE p.oid = c.conparentid)
ORDER BY 1, 3, 4;

-- :name descendants
-- A table, its partitions and its heirs.
WITH RECURSIVE tree AS (
    SELECT %(table)s::oid AS oid
    UNION
    SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
)
SELECT oid::int8 FROM tree;

-- :name interceptors
-- Triggers and rules that may change or suppress what is written.
WITH RECURSIVE tree AS (
    SELECT %(table)s::oid AS oid
    UNION
    SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
)
SELECT 'trigger ' || tgname FROM pg_trigger JOIN tree ON tree.oid = tgrelid WHERE NOT tgisinternal AND tgenabled <> 'D'
UNION
SELECT 'rule ' || rulename FROM pg_rewrite JOIN tree ON tree.oid = ev_class WHERE rulename <> '_RETURN' AND ev_enabled <> 'D'
ORDER BY 1;

-- :name unique_columns
-- The columns of which a unique index, or that of an exclusion constraint, is made; NULL is an expression's.
WITH RECURSIVE tree AS (
    SELECT %(table)s::pg_catalog.oid AS oid
    UNION
    SELECT i.inhrelid FROM tree JOIN pg_catalog.pg_inherits i ON i.inhparent = tree.oid
)
SELECT DISTINCT a.attname::pg_catalog.text
FROM tree
JOIN pg_catalog.pg_index i ON i.indrelid = tree.oid
JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid AND c.relname = %(name)s
CROSS JOIN pg_catalog.unnest(i.indkey) AS k (num)
LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = tree.oid AND a.attnum = k.num AND k.num > 0;
