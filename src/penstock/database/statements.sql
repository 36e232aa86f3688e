-- :name register_channel
-- Any generation's number of shards is accepted: after a change of it, processes are deployed one after the other.
-- Not under the name of a channel that was retired.
INSERT INTO {schema}.channels AS known (channel, kind, shards, keep, streams, hand, entries, redis_memory, max_bytes, limits)
SELECT %(channel)s::text, %(kind)s::text, %(shards)s::integer, %(keep)s::interval, %(streams)s::integer, %(hand)s::integer,
       %(entries)s::text, %(redis_memory)s::bigint, %(max_bytes)s::integer, %(limits)s::jsonb
WHERE NOT EXISTS (SELECT FROM {schema}.retired_channels WHERE channel = %(channel)s)
ON CONFLICT (channel) DO UPDATE
SET keep = excluded.keep, streams = excluded.streams, hand = excluded.hand, entries = excluded.entries,
    redis_memory = excluded.redis_memory, max_bytes = excluded.max_bytes, limits = excluded.limits
WHERE known.kind = excluded.kind AND excluded.shards = ANY (known.shards || known.generations)
  AND (known.keep, known.streams, known.hand, known.entries, known.redis_memory, known.max_bytes, known.limits)
      IS DISTINCT FROM (
          excluded.keep, excluded.streams, excluded.hand, excluded.entries, excluded.redis_memory, excluded.max_bytes,
          excluded.limits
      );

-- :name check_channel
SELECT kind, shards, fits, is_retired
FROM {schema}.check_channel(%(channel)s, %(kind)s, %(shards)s);

-- :name registered_channels
SELECT channel AS name, kind, shards, keep, streams, hand, entries, generations, redis_memory, limits
FROM {schema}.channels
ORDER BY channel;

-- :name queue_limits
-- Of a queue: those that are declared, and those that were set, by kind and name: {"tenants": {"account-7": {"weight": 3}}}.
SELECT c.limits::text, coalesce(jsonb_object_agg(l.kind || 's', l.own) FILTER (WHERE l.own IS NOT NULL), '{}')::text
FROM {schema}.channels c
LEFT JOIN (
    SELECT channel, kind, jsonb_object_agg(name, limits) AS own
    FROM {schema}.queue_limits
    GROUP BY channel, kind
) AS l ON l.channel = c.channel
WHERE c.channel = %(channel)s
GROUP BY c.channel;

-- :name lock_channel
-- Retention and the registration of a consumer exclude each other by this row.
SELECT
FROM {schema}.channels
WHERE channel = %(channel)s
FOR UPDATE;

-- :name pauses
SELECT kind, name, reason, paused_by, paused_at
FROM {schema}.pauses
ORDER BY kind, name;

-- :name former_consumer
SELECT successor
FROM {schema}.former_consumers
WHERE consumer = %(consumer)s;

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
  -- of others, those that it may read: that it may not read its own is an error
  AND (n.nspname = %(schema)s
       OR pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT'))
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

-- :name blockers
-- Whom `penstock init` waits for in this database; process 0 is a prepared transaction.
SELECT DISTINCT blocker.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, '')
FROM pg_stat_activity waiting
CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS blocker (pid)
LEFT JOIN pg_stat_activity a ON a.pid = blocker.pid
WHERE split_part(waiting.application_name, '/', 1) = 'penstock init' AND waiting.datname = current_database()
ORDER BY blocker.pid;

-- :name triggers
-- Functions that capture changes, each with its triggers.  Those of partitions are clones of their parent's.
SELECT p.proname, p.prosrc, t.tgname, c.oid, n.nspname, c.relname, t.tgtype,
       t.tgenabled IN ('O', 'A') AND t.tgattr::text = '' AND t.tgqual IS NULL, obj_description(t.oid, 'pg_trigger')
FROM pg_proc p
JOIN pg_namespace own ON own.oid = p.pronamespace
LEFT JOIN pg_trigger t ON t.tgfoid = p.oid AND t.tgparentid = 0
LEFT JOIN pg_class c ON c.oid = t.tgrelid
LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE own.nspname = %(schema)s AND p.prorettype = 'trigger'::regtype AND p.proname LIKE 'stage\_%%'
ORDER BY p.proname, t.tgname, n.nspname;

-- :name captured_tables
-- Tables of the given names: columns, the tables that hold rows of them, and the triggers that may fire before ours.  Temporary
-- tables that inherit are left out: each is of one session, and no other sees its rows.
SELECT c.oid, n.nspname, c.relname, c.relkind::text, c.relpersistence = 'u',
    (
        SELECT coalesce(jsonb_object_agg(a.attname, jsonb_build_array(t.typname, a.attgenerated = 'v', (
            SELECT jsonb_agg(e.enumlabel) FROM pg_enum e WHERE e.enumtypid = t.oid
        ))), '{}')
        FROM pg_attribute a
        JOIN pg_type t ON t.oid = a.atttypid
        WHERE a.attrelid = c.oid AND a.attnum > 0
    ),
    tree.parts,
    (
        SELECT coalesce(jsonb_agg(DISTINCT t.tgname), '[]')
        FROM pg_trigger t
        WHERE t.tgrelid = ANY (c.oid || tree.oids) AND NOT t.tgisinternal AND t.tgenabled IN ('O', 'A')
            AND t.tgtype & 67 = 1 AND NOT t.tginitdeferred  -- on rows, neither BEFORE nor INSTEAD OF
    )
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    WITH RECURSIVE members AS (
        SELECT inhrelid AS oid FROM pg_inherits WHERE inhparent = c.oid
        UNION
        SELECT i.inhrelid FROM members JOIN pg_inherits i ON i.inhparent = members.oid
    )
    SELECT coalesce(array_agg(m.oid), '{}') AS oids,
        coalesce(jsonb_agg(jsonb_build_array(
            m.oid::bigint, quote_ident(s.nspname) || '.' || quote_ident(m.relname), m.relkind, m.relispartition, (
                SELECT coalesce(jsonb_agg(t.tgname), '[]')
                FROM pg_trigger t
                WHERE t.tgrelid = m.oid AND t.tgparentid <> 0 AND t.tgenabled NOT IN ('O', 'A')
            )
        ) ORDER BY s.nspname, m.relname), '[]') AS parts
    FROM members
    JOIN pg_class m ON m.oid = members.oid
    JOIN pg_namespace s ON s.oid = m.relnamespace
    WHERE m.relpersistence <> 't'
) AS tree
WHERE c.relname = ANY (%(tables)s::text[])
ORDER BY n.nspname, c.relname;

-- :name owner_to_become
-- The owner of the tables, in quotes, if it is another role that this one may become, and that may create tables.
-- 'SET' is a privilege of membership since Postgres 16; before, every member may.
SELECT quote_ident(r.rolname)
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_roles r ON r.oid = c.relowner
WHERE n.nspname = %(schema)s::text AND c.relname = 'alembic_version' AND r.rolname <> current_user
  AND pg_has_role(r.oid, CASE WHEN current_setting('server_version_num')::int >= 160000 THEN 'SET' ELSE 'MEMBER' END)
  AND has_schema_privilege(r.oid, n.oid, 'CREATE');

-- :name lacking
-- Which of the given rights a role lacks, by their number.  By the catalog and not by `to_regclass`, which fails without
-- USAGE on the schema.
SELECT w.number::int
FROM unnest(%(kinds)s::text[], %(names)s::text[], %(privileges)s::text[], %(columns)s::text[])
         WITH ORDINALITY AS w (kind, name, privilege, col, number)
JOIN pg_roles r ON r.rolname = coalesce(%(role)s::text, current_user)
JOIN pg_namespace n ON n.nspname = %(schema)s::text
LEFT JOIN pg_class c ON w.kind IN ('TABLE', 'SEQUENCE') AND c.relnamespace = n.oid AND c.relname = w.name
LEFT JOIN pg_proc p ON w.kind = 'FUNCTION' AND p.pronamespace = n.oid AND p.proname = w.name
WHERE NOT CASE
    WHEN w.kind = 'SCHEMA' THEN has_schema_privilege(r.oid, n.oid, w.privilege)
    WHEN w.kind = 'FUNCTION' THEN has_function_privilege(r.oid, p.oid, w.privilege)
    WHEN w.kind = 'SEQUENCE' THEN has_sequence_privilege(r.oid, c.oid, w.privilege)
    WHEN w.col <> '' THEN has_column_privilege(r.oid, c.oid, w.col, w.privilege)
    ELSE has_table_privilege(r.oid, c.oid, w.privilege)
END
ORDER BY w.number;

-- :name known_roles
SELECT rolname
FROM pg_roles
WHERE rolname = ANY (%(roles)s::text[]);

-- :name owned_by_others
-- Penstock's tables, domains and functions that are not the owner's.  A sequence goes with its table.  The functions of triggers
-- stay: they may use what their owner may use.
SELECT 'TABLE', relname::text
FROM pg_class
WHERE relnamespace = to_regnamespace(%(schema)s::text) AND relname = ANY (%(tables)s::text[])
  AND relowner IS DISTINCT FROM to_regrole(%(owner)s::text)::oid
UNION ALL
SELECT 'DOMAIN', typname::text
FROM pg_type
WHERE typnamespace = to_regnamespace(%(schema)s::text) AND typname = ANY (%(domains)s::text[])
  AND typowner IS DISTINCT FROM to_regrole(%(owner)s::text)::oid
UNION ALL
SELECT 'FUNCTION', format('%%I(%%s)', proname, pg_get_function_identity_arguments(oid))
FROM pg_proc
WHERE pronamespace = to_regnamespace(%(schema)s::text) AND proname = ANY (%(functions)s::text[])
  AND proowner IS DISTINCT FROM to_regrole(%(owner)s::text)::oid
ORDER BY 1, 2;

-- :name granted
-- Every privilege on the schema and on Penstock's objects that a role other than the object's owner holds by name.
SELECT coalesce(r.rolname, 'public'), o.kind, o.name, a.privilege_type, o.col
FROM (
    SELECT 'SCHEMA' AS kind, '' AS name, '' AS col, nspowner AS owner, nspacl AS acl
    FROM pg_namespace
    WHERE nspname = %(schema)s::text
    UNION ALL
    SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, relname::text, '', relowner, relacl
    FROM pg_class
    WHERE relnamespace = to_regnamespace(%(schema)s::text)
      AND relname = ANY (%(tables)s::text[] || 'staged_records_id_seq'::text)
    UNION ALL
    SELECT 'TABLE', c.relname::text, a.attname::text, c.relowner, a.attacl
    FROM pg_class c
    JOIN pg_attribute a ON a.attrelid = c.oid
    WHERE c.relnamespace = to_regnamespace(%(schema)s::text) AND c.relname = ANY (%(tables)s::text[])
      AND a.attacl IS NOT NULL
    UNION ALL
    SELECT 'FUNCTION', proname::text, '', proowner, proacl
    FROM pg_proc
    WHERE pronamespace = to_regnamespace(%(schema)s::text) AND proname = ANY (%(functions)s::text[])
) o
CROSS JOIN LATERAL aclexplode(o.acl) a
LEFT JOIN pg_roles r ON r.oid = a.grantee
WHERE a.grantee <> o.owner;

-- :name role_details
-- Whether this role acts as the owner; the viewer reads tables to come, and sees others' activity; this role may let it.
SELECT coalesce(pg_has_role(to_regrole(%(owner)s::text), 'USAGE'), me.rolsuper),
       EXISTS (
           SELECT
           FROM pg_default_acl d
           CROSS JOIN LATERAL aclexplode(d.defaclacl) a
           WHERE d.defaclrole = to_regrole(%(owner)s::text) AND d.defaclnamespace = to_regnamespace(%(schema)s::text)
             AND d.defaclobjtype = 'r' AND a.grantee = to_regrole(%(viewer)s::text) AND a.privilege_type = 'SELECT'
       ),
       coalesce(pg_has_role(to_regrole(%(viewer)s::text), 'pg_read_all_stats', 'USAGE'), false),
       me.rolsuper OR pg_has_role('pg_read_all_stats', 'USAGE WITH ADMIN OPTION')
FROM pg_roles me
WHERE me.rolname = current_user;
