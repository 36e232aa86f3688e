"""Penstock's tables and functions.

Revision ID: penstock_0001
Revises:
Create Date: 2026-11-24
"""

from penstock.schema.initialise import CREATE_SCHEMA, execute

revision = "penstock_0001"
down_revision = None
branch_labels = ("penstock",)
depends_on = None

STREAMING = (
    """
-- The limits of staging, for INSERTs written by hand: a record outside of them has no place in the log.  In domains, since Postgres
-- reads the CHECK constraints of a table anew for every INSERT, which takes half of its time; those of domains it remembers.
CREATE DOMAIN {schema}.staged_shard AS integer CONSTRAINT staged_shard CHECK (VALUE BETWEEN 0 AND 1023)
""",
    """
-- A regular expression without repetition takes a tenth of a microsecond.
CREATE DOMAIN {schema}.staged_channel AS text
CONSTRAINT staged_channel CHECK (length(VALUE) BETWEEN 1 AND 63 AND VALUE COLLATE "C" !~ '[^a-z0-9_.@-]')
""",
    """
CREATE DOMAIN {schema}.staged_key AS text CONSTRAINT staged_key CHECK (length(VALUE) BETWEEN 1 AND 1024)
""",
    """
CREATE DOMAIN {schema}.staged_action AS text CONSTRAINT staged_action CHECK (length(VALUE) BETWEEN 1 AND 255)
""",
    """
CREATE DOMAIN {schema}.staged_object AS text CONSTRAINT staged_object CHECK (length(VALUE) BETWEEN 1 AND 255)
""",
    """
CREATE DOMAIN {schema}.staged_created_at AS timestamptz
CONSTRAINT staged_created_at CHECK (VALUE >= '1900-01-01 00:00:00+00' AND VALUE < '2200-01-01 00:00:00+00')
""",
    """
-- Insert-only for applications.  CACHE 1, because a tick numbers records in the order of their ids: a connection that
-- drew ids ahead would put a later change of a key before an earlier one.
CREATE TABLE {schema}.staged_records (
    id          bigint                      GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    xid         xid8                        NOT NULL DEFAULT pg_current_xact_id(),
    channel     {schema}.staged_channel     NOT NULL,
    shard       {schema}.staged_shard       NOT NULL,
    key         {schema}.staged_key         NOT NULL,
    action      {schema}.staged_action      NOT NULL,
    object      {schema}.staged_object      NOT NULL,
    data        jsonb                       NOT NULL,
    headers     jsonb,
    created_at  {schema}.staged_created_at  NOT NULL DEFAULT clock_timestamp()
)
""",
    """
CREATE INDEX staged_records_xid ON {schema}.staged_records (xid)
""",
    """
-- Of jobs alone, by which applications cancel them.  By a hash, because an entry of an index has at most 2,704 bytes.
CREATE INDEX staged_records_unique ON {schema}.staged_records (
    channel, hashtextextended(headers -> 'penstock' -> 'unique' ->> 'name', 0)
)
WHERE headers -> 'penstock' -> 'unique' ->> 'name' IS NOT NULL
""",
    """
-- One row for each lineage of the database that the log has followed.
CREATE TABLE {schema}.epochs (
    epoch             integer     PRIMARY KEY,
    system_identifier text        NOT NULL,
    timeline          integer     NOT NULL,
    reason            text        NOT NULL,
    opened_at         timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
INSERT INTO {schema}.epochs (epoch, system_identifier, timeline, reason)
SELECT 1, system_identifier::text, ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer, 'init'
FROM pg_control_system()
""",
    """
-- Inserted, never updated: the newest is the last index entry, however many dead rows a long transaction keeps alive.
CREATE TABLE {schema}.ticks (
    tick     bigint      PRIMARY KEY,
    snapshot pg_snapshot NOT NULL,
    epoch    integer     NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
-- A tick that saw nothing: everything staged is new to the first real one.
INSERT INTO {schema}.ticks (tick, snapshot, epoch) VALUES (0, '1:1:', 1)
""",
    """
CREATE TABLE {schema}.journal (
    channel      text        NOT NULL,
    shard        integer     NOT NULL,
    first_offset bigint      NOT NULL,
    last_offset  bigint      NOT NULL,
    record_ids   bigint[]    NOT NULL,
    epoch        integer     NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (channel, shard, first_offset),
    CONSTRAINT journal_is_dense CHECK (cardinality(record_ids) = last_offset - first_offset + 1)
)
""",
    """
-- First and last offset of a shard's journal; (1, 0) if it is empty.  A view with two parameters: Postgres inlines it
-- into the query that calls it, where each column that is used costs one probe of the primary key.  A view without
-- parameters would need a list of shards, or read the whole journal.
CREATE FUNCTION {schema}.journal_bounds(of_channel text, of_shard integer)
RETURNS TABLE (first_offset bigint, last_offset bigint)
LANGUAGE sql STABLE PARALLEL SAFE ROWS 1
BEGIN ATOMIC
    SELECT coalesce((
               SELECT j.first_offset
               FROM {schema}.journal j
               WHERE j.channel = of_channel AND j.shard = of_shard
               ORDER BY j.first_offset
               LIMIT 1
           ), 1),
           coalesce((
               SELECT j.last_offset
               FROM {schema}.journal j
               WHERE j.channel = of_channel AND j.shard = of_shard
               ORDER BY j.first_offset DESC
               LIMIT 1
           ), 0)
    OFFSET 0;  -- each column is evaluated once, however often the query names it
END
""",
    """
-- The rows of a shard's journal with the first records after an offset, `most` at most.  A view with four parameters, likewise.
-- From the row that holds the first of them, or the journal's oldest; offsets are dense, so no row that begins `most` beyond it can
-- hold any.
CREATE FUNCTION {schema}.journal_entries(of_channel text, of_shard integer, "after" bigint, most bigint)
RETURNS TABLE (first_offset bigint, last_offset bigint, record_ids bigint[])
LANGUAGE sql STABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT j.first_offset, j.last_offset, j.record_ids
    FROM {schema}.journal j,
         LATERAL (
             SELECT coalesce(
                        (SELECT max(first_offset)
                         FROM {schema}.journal
                         WHERE channel = of_channel AND shard = of_shard AND first_offset <= "after" + 1),
                        (SELECT first_offset FROM {schema}.journal_bounds(of_channel, of_shard))
                    ) AS at
         ) start
    WHERE j.channel = of_channel AND j.shard = of_shard
      AND j.first_offset >= start.at
      AND j.first_offset < greatest(start.at, "after" + 1) + most;
END
""",
    """
-- Staged rows that no tick can give an offset, as long as they have this xid.  is_early: its transaction has not begun.
CREATE TABLE {schema}.isolated_records (
    record_id   bigint      PRIMARY KEY,
    number      bigint      GENERATED ALWAYS AS IDENTITY UNIQUE,
    xid         xid8        NOT NULL,
    channel     text        NOT NULL,
    shard       integer     NOT NULL,
    reason      text        NOT NULL,
    is_early    boolean     NOT NULL DEFAULT false,
    isolated_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
-- Shards that the streamer leaves out, and why.
CREATE TABLE {schema}.stopped_shards (
    channel    text        NOT NULL,
    shard      integer     NOT NULL,
    reason     text        NOT NULL,
    stopped_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (channel, shard)
)
""",
    """
-- What functions of pipeline.on_trouble were called with, until it has ended: `detail` changes if it is another one.
CREATE TABLE {schema}.troubles (
    kind    text        NOT NULL,
    subject text        NOT NULL,
    detail  text        NOT NULL,
    reported_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (kind, subject)
)
""",
)

CHANNELS = (
    """
--   generations   numbers of shards of the later generations; `shards` is that of the first, and `first_shard` is where the
--                 newest begins: 4, {6,3} and 10 are the shards 0-3, 4-9 and 10-12
--   entries       of a log: 'plain' is an entry a record; otherwise a batch an entry, compressed: 'none' or 'zstd'
--   redis_memory  of a log: bytes for the streams of all shards together; null sets no limit
--   max_bytes     of a payload, as JSON
--   streams, hand of a queue
--   limits        of a queue, by tenant, "" for the default: {"account-7": {"weight": 3}}
CREATE TABLE {schema}.channels (
    channel       text        PRIMARY KEY,
    kind          text        NOT NULL,
    shards        integer     NOT NULL,
    generations   integer[]   NOT NULL DEFAULT '{}',
    first_shard   integer     NOT NULL DEFAULT 0,
    keep          interval    NOT NULL,
    entries       text        NOT NULL DEFAULT 'plain',
    redis_memory  bigint,
    max_bytes     integer     NOT NULL DEFAULT 1048576,
    streams       integer,
    hand          integer,
    limits        jsonb       NOT NULL DEFAULT '{}',
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
-- Names that no channel may be registered with any more, and nothing may be staged for.
CREATE TABLE {schema}.retired_channels (
    channel    text        PRIMARY KEY,
    retired_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
-- A producer may not read the tables; everyone who may use the schema may call this.  No row: a channel that is not registered
-- yet.  `fits`: a channel that is declared with this kind and number of shards may be used.  Every number that the channel has
-- had will do: since it was changed, the key decides the shard, when the record is sequenced.
CREATE FUNCTION {schema}.check_channel(of_channel text, of_kind text, of_shards integer)
RETURNS TABLE (kind text, shards integer, fits boolean, is_retired boolean)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT c.kind, (c.shards || c.generations)[1 + cardinality(c.generations)],
           c.kind = of_kind AND of_shards = ANY (c.shards || c.generations),
           r.channel IS NOT NULL
    FROM (SELECT of_channel AS channel) asked
    LEFT JOIN {schema}.retired_channels r ON r.channel = asked.channel
    LEFT JOIN {schema}.channels c ON c.channel = asked.channel
    WHERE r.channel IS NOT NULL OR c.channel IS NOT NULL;
END
""",
    """
-- Records of queues that Redis is given later than the others, or a second time.
--   tenant    set for a record that Redis has refused, because this tenant has no room
--   due       from when on Redis is given it: up to an hour before it may be handed over
--   is_given  Redis has it, as far as is known: the row stays until the record is finished, so that it can be given again
CREATE TABLE {schema}.waiting_records (
    record_id bigint      PRIMARY KEY,
    channel   text        NOT NULL,
    shard     integer     NOT NULL,
    tenant    text,
    due       timestamptz NOT NULL DEFAULT clock_timestamp(),
    is_given  boolean     NOT NULL DEFAULT false
)
""",
    """
CREATE INDEX waiting_records_due ON {schema}.waiting_records (channel, shard, due)
WHERE NOT is_given AND tenant IS NULL
""",
    """
CREATE INDEX waiting_records_tenants ON {schema}.waiting_records (channel, shard, tenant, record_id)
WHERE NOT is_given AND tenant IS NOT NULL
""",
    """
CREATE INDEX waiting_records_given ON {schema}.waiting_records (channel, shard, record_id)
WHERE is_given
""",
    """
-- Unique names of a queue with several shards, of which each knows only its own.  `ends` is the end of a window; without one, a
-- name is held until its record is done, or `is_queued` and handed over.
CREATE TABLE {schema}.unique_names (
    channel   text    NOT NULL,
    name      text    NOT NULL,
    record_id bigint  NOT NULL,
    shard     integer NOT NULL,
    is_queued boolean NOT NULL,
    ends      timestamptz,
    PRIMARY KEY (channel, name)
)
""",
    """
-- Limits of a queue's tenants and keys that were set while it runs; they come before declared ones.  The name '' is all others.
CREATE TABLE {schema}.queue_limits (
    channel text        NOT NULL,
    kind    text        NOT NULL CHECK (kind IN ('tenant', 'key')),
    name    text        NOT NULL,
    limits  jsonb       NOT NULL,
    set_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (channel, kind, name)
)
""",
    """
-- The row of a record is what says that its effect is outstanding.  A worker deletes it in the transaction of the effect.  The
-- worker that deletes it has done the effect; one that comes second waits for the commit of the first, and finds nothing.
-- With staged_us, a time for each id, only records that were staged then: a restored Postgres gives ids out again.
CREATE FUNCTION {schema}.finish_records(of_channel text, ids bigint[], staged_us bigint[] DEFAULT NULL)
RETURNS SETOF bigint
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET row_security = off
SET plan_cache_mode = force_generic_plan  -- planning takes longer than the rest
SET enable_seqscan = off  -- a plan that is kept must hold when the table has grown
BEGIN ATOMIC
    WITH outstanding AS MATERIALIZED (
        SELECT r.id
        FROM {schema}.staged_records r
        WHERE r.id = ANY (ids) AND r.channel = of_channel
          AND (staged_us IS NULL
               OR (extract(epoch FROM r.created_at) * 1000000)::bigint = staged_us[array_position(ids, r.id)])
          AND EXISTS (SELECT FROM {schema}.channels c WHERE c.channel = of_channel AND c.kind = 'queue')
        ORDER BY r.id  -- two workers with the same records lock them in one order
        FOR UPDATE OF r
    )
    DELETE FROM {schema}.staged_records r
    USING outstanding
    WHERE r.id = outstanding.id
    RETURNING r.id;
END
""",
    """
REVOKE ALL ON FUNCTION {schema}.finish_records(text, bigint[], bigint[]) FROM PUBLIC
""",
    """
-- Jobs that are to have no effect.  The streamer has Redis forget those whose staged row is gone; the row here stays for the queue's
-- `keep`, for a worker that is at the job, and for who asks later.  has_no_effect: the staged row was deleted by who cancelled, or by
-- the worker that has rolled back, also by its handler's own Cancel; otherwise that worker was faster, or is at it still.
CREATE TABLE {schema}.cancellations (
    record_id     bigint      PRIMARY KEY,
    channel       text        NOT NULL,
    shard         integer     NOT NULL,
    has_no_effect boolean     NOT NULL,
    forgotten_at  timestamptz
)
""",
    """
CREATE INDEX cancellations_known ON {schema}.cancellations (channel, shard, record_id)
WHERE forgotten_at IS NULL
""",
    """
CREATE INDEX cancellations_forgotten ON {schema}.cancellations (channel, shard, forgotten_at)
WHERE forgotten_at IS NOT NULL
""",
    """
-- A job is cancelled by who deletes its row, as it is done by who does.  A row that is locked is that of a job whose effect may be
-- about to be committed: it is noted, for who has the lock, and for the streamer after that.  Nobody waits for
-- a worker.  Two that cancel the same job wait for each other, since either may roll back, and the job is still to be cancelled.
CREATE FUNCTION {schema}.cancel_jobs(of_channel text, ids bigint[], of_name text, of_tenant text)
RETURNS TABLE (job bigint, is_running boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    WITH named AS MATERIALIZED (
        SELECT r.id, r.shard
        FROM {schema}.staged_records r
        WHERE r.channel = of_channel
          AND (r.id = ANY (ids)
               OR (hashtextextended(r.headers -> 'penstock' -> 'unique' ->> 'name', 0) = hashtextextended(of_name, 0)
                   AND r.headers -> 'penstock' -> 'unique' ->> 'name' = of_name))
          AND (of_tenant IS NULL OR r.key = of_tenant)
          AND NOT EXISTS (SELECT FROM {schema}.channels c WHERE c.channel = of_channel AND c.kind <> 'queue')
    ),
    free AS MATERIALIZED (
        SELECT r.id
        FROM {schema}.staged_records r
        JOIN named USING (id)
        FOR UPDATE OF r SKIP LOCKED
    ),
    removed AS (
        DELETE FROM {schema}.staged_records r
        USING free
        WHERE r.id = free.id
    ),
    noted AS (
        INSERT INTO {schema}.cancellations (record_id, channel, shard, has_no_effect)
        SELECT named.id, of_channel, named.shard, free.id IS NOT NULL
        FROM named
        LEFT JOIN free USING (id)
        LEFT JOIN {schema}.cancellations known ON known.record_id = named.id
        WHERE known.record_id IS NULL OR (free.id IS NOT NULL AND NOT known.has_no_effect)  -- a conflict would wait for its writer
        ORDER BY named.id  -- two that cancel the same jobs write them in one order
        ON CONFLICT (record_id) DO UPDATE
        SET has_no_effect = true
        WHERE excluded.has_no_effect
    )
    SELECT named.id, free.id IS NULL
    FROM named
    LEFT JOIN free USING (id)
    ORDER BY named.id;
END
""",
    """
REVOKE ALL ON FUNCTION {schema}.cancel_jobs(text, bigint[], text, text) FROM PUBLIC
""",
    """
-- Jobs that are due at another time, but for those that a worker has locked.  Redis is given them again, an hour before.
CREATE FUNCTION {schema}.move_jobs(of_channel text, ids bigint[], at timestamptz)
RETURNS SETOF bigint
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    WITH free AS MATERIALIZED (
        SELECT r.id,
               CASE jsonb_typeof(r.headers) WHEN 'object' THEN r.headers ELSE '{}' END AS headers,
               CASE jsonb_typeof(r.headers -> 'penstock') WHEN 'object' THEN r.headers -> 'penstock' ELSE '{}' END AS own
        FROM {schema}.staged_records r
        WHERE r.id = ANY (ids) AND r.channel = of_channel
          AND EXISTS (SELECT FROM {schema}.channels c WHERE c.channel = of_channel AND c.kind = 'queue')
        FOR UPDATE SKIP LOCKED
    ),
    moved AS (
        UPDATE {schema}.staged_records r
        SET headers = free.headers || jsonb_build_object(
                'penstock', free.own - 'delay_ms' || jsonb_build_object('due', (extract(epoch FROM at) * 1000)::bigint)
            )
        FROM free
        WHERE r.id = free.id
        RETURNING r.id, r.shard
    )
    INSERT INTO {schema}.waiting_records (record_id, channel, shard, due)
    SELECT moved.id, of_channel, shard,
           least(
               at,
               -- at its deadline it is a dead letter, due or not
               CASE
                   WHEN jsonb_typeof(own -> 'deadline') = 'number' AND (own ->> 'deadline')::numeric BETWEEN 1 AND 4e15
                   THEN to_timestamp((own ->> 'deadline')::double precision / 1000)
               END
           ) - interval '1 hour'
    FROM moved
    JOIN free USING (id)
    ON CONFLICT (record_id) DO UPDATE
    SET due = excluded.due, tenant = NULL, is_given = false
    RETURNING record_id;
END
""",
    """
REVOKE ALL ON FUNCTION {schema}.move_jobs(text, bigint[], timestamptz) FROM PUBLIC
""",
    """
-- What workers note of a job beside its record, which it outlives: a row only if there is something to note.
--   attempts  those that failed, and the one that was done after them: [{"attempt", "worker", "began_at", "ended_at", "error"}, …]
--   progress, note  what the handler said last
CREATE TABLE {schema}.job_notes (
    record_id bigint      PRIMARY KEY,
    channel   text        NOT NULL,
    attempts  jsonb       NOT NULL DEFAULT '[]',
    progress  real,
    note      text,
    noted_at  timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
CREATE INDEX job_notes_progress ON {schema}.job_notes (channel, noted_at)
WHERE attempts = '[]'
""",
    """
CREATE INDEX job_notes_attempts ON {schema}.job_notes (channel, noted_at)
WHERE attempts <> '[]'
""",
    """
-- Results of jobs, each written in the transaction of its effect.
CREATE TABLE {schema}.job_results (
    record_id bigint      PRIMARY KEY,
    channel   text        NOT NULL,
    result    jsonb       NOT NULL,
    done_at   timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
CREATE INDEX job_results_done ON {schema}.job_results (channel, done_at)
""",
    """
-- Jobs that were staged together.  Once no staged row of a member is left, the group has ended, and `following` is staged.
--   waits_for  a member that was left when the group was looked at last: while it is, no other need be looked at
--   following  a row of staged_records, as staging writes it: [channel, shard, key, action, object, data, headers]
CREATE TABLE {schema}.job_groups (
    name      text        PRIMARY KEY,
    channel   text        NOT NULL,
    members   bigint[]    NOT NULL,
    waits_for bigint      NOT NULL,
    following jsonb,
    staged_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at  timestamptz
)
""",
    """
CREATE INDEX job_groups_open ON {schema}.job_groups (waits_for)
WHERE ended_at IS NULL
""",
    """
CREATE INDEX job_groups_ended ON {schema}.job_groups (channel, ended_at)
WHERE ended_at IS NOT NULL
""",
)

STAGING = (
    """
-- What `stage`, `stage_job` and `mark_dirty` have in common, for their owner alone: the limits of staging, with errors that name
-- the field, the limit and the fix, and the shard as every client computes it.
CREATE FUNCTION {schema}.stage_record(
    of_channel text, of_kind text, key text, action text, object text, data jsonb, headers jsonb
)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $penstock$
#variable_conflict use_variable
DECLARE
    registered record;
    field text;
    fault text;
    fix text;
    id bigint;
BEGIN
    SELECT c.kind, c.max_bytes, (c.shards || c.generations)[1 + cardinality(c.generations)] AS shards
    INTO registered
    FROM {schema}.channels c
    WHERE c.channel = of_channel AND NOT EXISTS (SELECT FROM {schema}.retired_channels r WHERE r.channel = of_channel);
    IF registered.kind IS DISTINCT FROM of_kind THEN
        field := CASE of_kind WHEN 'queue' THEN 'queue' ELSE 'channel' END;
        IF of_channel IS NULL THEN
            fault := 'is NULL';
        ELSIF registered.kind IS NOT NULL THEN
            fault := of_channel || ' is registered as ' || CASE registered.kind WHEN 'ick' THEN 'an ick' ELSE 'a ' || registered.kind END;
            fix := CASE registered.kind
                WHEN 'log' THEN 'Call stage(channel, key, action, object, data).'
                WHEN 'queue' THEN 'Call stage_job(queue, tenant, data).'
                ELSE 'An Ick keeps no payloads: call mark_dirty(channel, member).'
            END;
        ELSIF EXISTS (SELECT FROM {schema}.retired_channels r WHERE r.channel = of_channel) THEN
            fault := of_channel || ' was retired';
            fix := 'Begin it anew, penstock channels adopt ' || of_channel || ' --apply, or name another one.';
        ELSE
            fault := of_channel || ' is not registered';
            fix := 'Declare it in the pipeline and start its streamer, penstock stream, which registers it.';
        END IF;
    ELSIF key IS NULL OR length(key) NOT BETWEEN 1 AND 1024 THEN
        field := CASE of_kind WHEN 'queue' THEN 'tenant' WHEN 'ick' THEN 'member' ELSE 'key' END;
        fault := CASE WHEN key IS NULL THEN 'is NULL' ELSE 'has ' || length(key) || ' characters' END;
        fix := 'It takes 1 to 1024 characters.';
    ELSIF action IS NULL OR length(action) NOT BETWEEN 1 AND 255 THEN
        field := 'action';
        fault := CASE WHEN action IS NULL THEN 'is NULL' ELSE 'has ' || length(action) || ' characters' END;
        fix := 'It takes 1 to 255 characters.';
    ELSIF object IS NULL OR length(object) NOT BETWEEN 1 AND 255 THEN
        field := 'object';
        fault := CASE WHEN object IS NULL THEN 'is NULL' ELSE 'has ' || length(object) || ' characters' END;
        fix := 'It takes 1 to 255 characters.';
    ELSIF data IS NULL THEN
        field := 'data';
        fault := 'is NULL';
        fix := 'It takes JSON; JSON''s own null is the text null.';
    ELSIF octet_length(data::text) > registered.max_bytes THEN  -- not of jsonb: 1e100000 takes ten bytes there
        field := 'data';
        fault := 'has ' || octet_length(data::text) || ' bytes of JSON';
        fix := 'It takes ' || registered.max_bytes
            || ' (max_bytes of the channel): stage a reference and keep the content elsewhere, or raise the limit.';
    -- A level takes eight bytes of jsonb: what is smaller cannot be so deep.
    ELSIF pg_column_size(data) > 800 AND data @? 'strict $.**{100} ? (@.type() == "array" || @.type() == "object")' THEN
        field := 'data';
        fault := 'is nested deeper than 100 levels';
        fix := 'Flatten it.';
    ELSIF headers IS NOT NULL AND jsonb_typeof(headers) <> 'object' THEN
        field := 'headers';
        fault := 'is of type ' || jsonb_typeof(headers);
        fix := 'It takes an object, or NULL.';
    ELSIF octet_length(headers::text) > 65536 THEN
        field := 'headers';
        fault := 'has ' || octet_length(headers::text) || ' bytes of JSON';
        fix := 'It takes 65536.';
    ELSE
        INSERT INTO {schema}.staged_records (channel, shard, key, action, object, data, headers)
        VALUES (
            of_channel,
            mod(
                ('x' || encode(substr(sha256(convert_to(key, 'UTF8')), 1, 4), 'hex'))::bit(32)::bigint, registered.shards
            ),
            key, action, object, data, headers
        )
        RETURNING staged_records.id INTO id;
        RETURN id;
    END IF;
    RAISE EXCEPTION USING
        ERRCODE = 'invalid_parameter_value', MESSAGE = 'penstock: ' || field || ' ' || fault, HINT = coalesce(fix, '');
END
$penstock$
""",
    """
-- Stages a record of a log in the transaction of the change that it tells of, from any language; returns its id.
CREATE FUNCTION {schema}.stage(
    channel text, key text, action text, object text, data jsonb, headers jsonb DEFAULT NULL
)
RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $penstock$
BEGIN
    IF headers ? 'penstock' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'penstock: headers.penstock is Penstock''s own',
            HINT = 'Give the header another name.';
    END IF;
    RETURN {schema}.stage_record(channel, 'log', key, action, object, data, headers);
END
$penstock$
""",
    """
-- Stages a job; returns its id, which is the handler's `job.id`.  What a queue has to know of it stands in headers.penstock.
CREATE FUNCTION {schema}.stage_job(
    queue text,
    tenant text,
    data jsonb,
    delay interval DEFAULT NULL,
    due timestamptz DEFAULT NULL,
    deadline timestamptz DEFAULT NULL,
    priority text DEFAULT 'normal',
    key text DEFAULT NULL,
    unique_name text DEFAULT NULL,
    unique_until text DEFAULT 'running',
    unique_window interval DEFAULT NULL,
    unique_within text DEFAULT 'queue',
    action text DEFAULT 'stage_job',
    object text DEFAULT 'job',
    headers jsonb DEFAULT NULL
)
RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $penstock$
DECLARE
    longest CONSTANT interval := interval '87600 hours';
    own jsonb;
    field text;
    fault text;
    fix text;
BEGIN
    IF headers ? 'penstock' THEN
        field := 'headers.penstock';
        fault := 'is Penstock''s own';
        fix := 'Give the header another name.';
    ELSIF tenant IS NOT NULL AND (octet_length(tenant) NOT BETWEEN 1 AND 256 OR tenant ~ E'\\x01') THEN
        field := 'tenant';
    ELSIF key IS NOT NULL AND (octet_length(key) NOT BETWEEN 1 AND 256 OR key ~ E'\\x01') THEN
        field := 'key';
    ELSIF unique_name IS NOT NULL AND (octet_length(unique_name) NOT BETWEEN 1 AND 256 OR unique_name ~ E'\\x01') THEN
        field := 'unique_name';
    ELSIF delay IS NOT NULL AND (delay < interval '0' OR delay > longest) THEN
        field := 'delay';
        fault := 'is out of range';
        fix := 'It takes 0 to ten years.';
    ELSIF delay > interval '0' AND due IS NOT NULL THEN
        field := 'due';
        fault := 'and a delay exclude each other';
        fix := 'Give one of them.';
    ELSIF deadline <= due THEN
        field := 'deadline';
        fault := 'is not after due: the job would never be handed over';
        fix := 'Give a later one, or none.';
    ELSIF NOT isfinite(due) OR NOT isfinite(deadline) THEN
        field := CASE WHEN isfinite(due) IS NOT FALSE THEN 'deadline' ELSE 'due' END;
        fault := 'is infinite';
        fix := 'Give a moment, or none.';
    ELSIF priority IS NULL OR priority NOT IN ('high', 'normal', 'low') THEN
        field := 'priority';
        fault := 'is none';
        fix := 'It takes high, normal or low.';
    ELSIF unique_until IS NULL OR unique_until NOT IN ('queued', 'running') THEN
        field := 'unique_until';
        fault := 'is none';
        fix := 'It takes queued or running.';
    ELSIF unique_within IS NULL OR unique_within NOT IN ('queue', 'tenant') THEN
        field := 'unique_within';
        fault := 'is none';
        fix := 'It takes queue or tenant.';
    ELSIF unique_window IS NOT NULL AND (unique_window < interval '0' OR unique_window > longest) THEN
        field := 'unique_window';
        fault := 'is out of range';
        fix := 'It takes 0 to ten years.';
    END IF;
    IF field IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'penstock: ' || field || ' ' || coalesce(fault, 'is no name for a queue'),
            HINT = coalesce(fix, 'It takes 1 to 256 bytes without the character U+0001.');
    END IF;
    own := jsonb_strip_nulls(jsonb_build_object(
        'key', key,
        'delay_ms', CASE WHEN delay > interval '0' THEN round(extract(epoch FROM delay) * 1000)::bigint END,
        'due', CASE WHEN due IS NOT NULL THEN greatest(1, floor(extract(epoch FROM due) * 1000)::bigint) END,
        'deadline', CASE WHEN deadline IS NOT NULL THEN greatest(1, floor(extract(epoch FROM deadline) * 1000)::bigint) END,
        'priority', nullif(priority, 'normal'),
        'unique', CASE WHEN unique_name IS NOT NULL THEN jsonb_build_object(
            'name', unique_name,
            'until', CASE WHEN unique_window > interval '0' THEN 'window' ELSE unique_until END,
            'for_s', coalesce(extract(epoch FROM unique_window), 0),
            'within', nullif(unique_within, 'queue')
        ) END
    ));
    IF own <> '{}' THEN
        headers := coalesce(headers, '{}') || jsonb_build_object('penstock', own);
    END IF;
    RETURN {schema}.stage_record(queue, 'queue', tenant, action, object, data, headers);
END
$penstock$
""",
    """
-- Marks a member of an Ick dirty.
CREATE FUNCTION {schema}.mark_dirty(channel text, member text)
RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $penstock$
BEGIN
    RETURN {schema}.stage_record(channel, 'ick', member, 'dirty', 'member', '{}', NULL);
END
$penstock$
""",
    """
-- Cancels a job, by its id or its unique name: true if it has no effect once this is committed, false if a worker has begun to
-- write, which rolls back unless it commits within a second; NULL if it is done, or unknown.
CREATE FUNCTION {schema}.cancel_job(
    queue text, id bigint DEFAULT NULL, unique_name text DEFAULT NULL, tenant text DEFAULT NULL
)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $penstock$
BEGIN
    IF id IS NULL AND unique_name IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'penstock: id is NULL',
            HINT = 'Name the job: by its id, which stage_job has returned, or by its unique_name.';
    END IF;
    RETURN (SELECT bool_and(NOT is_running) FROM {schema}.cancel_jobs(queue, ARRAY[id], unique_name, tenant));
END
$penstock$
""",
    """
REVOKE ALL ON FUNCTION
    {schema}.stage_record(text, text, text, text, text, jsonb, jsonb),
    {schema}.stage(text, text, text, text, jsonb, jsonb),
    {schema}.stage_job(
        text, text, jsonb, interval, timestamptz, timestamptz, text, text, text, text, interval, text, text, text, jsonb
    ),
    {schema}.mark_dirty(text, text),
    {schema}.cancel_job(text, bigint, text, text)
FROM PUBLIC
""",
)

CONSUMING = (
    """
-- Updated once per batch: free space keeps the updates on the same page.
--   source, record_id, staged_us  in the database of a consumer of several sources: the source of the checkpoint, and the
--                 record at it, by its number and the time of its staging, which the source's journal must still have there
--   reported_by   in the database of a source: the database of the consumer that reports the checkpoint
CREATE TABLE {schema}.checkpoints (
    consumer        text        NOT NULL,
    channel         text        NOT NULL,
    shard           integer     NOT NULL,
    "offset"        bigint      NOT NULL,
    epoch           integer     NOT NULL,
    applied         bigint      NOT NULL DEFAULT 0,
    skipped         bigint      NOT NULL DEFAULT 0,
    dead            bigint      NOT NULL DEFAULT 0,
    dead_in_a_row   bigint      NOT NULL DEFAULT 0,
    applied_at_dead bigint,
    halted          text,
    waiting         text,
    source          text,
    record_id       bigint,
    staged_us       bigint,
    reported_by     text,
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, channel, shard)
) WITH (fillfactor = 25, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
""",
    """
-- When the next job of a schedule is staged; null: never again.  digest: of its other options.  skipped: the last times of which
-- it has staged none, because no streamer had run.
CREATE TABLE {schema}.schedules (
    name          text        PRIMARY KEY,
    channel       text        NOT NULL,
    every         text        NOT NULL,
    timezone      text        NOT NULL,
    digest        text        NOT NULL DEFAULT '',
    next_at       timestamptz CHECK (next_at BETWEEN '1970-01-01' AND '9999-01-01'),  -- 'infinity' is no time of Python's
    last_at       timestamptz CHECK (last_at BETWEEN '1970-01-01' AND '9999-01-01'),
    skipped_since timestamptz,
    skipped_until timestamptz
)
""",
    """
-- kind: consumer, channel: all of its consumers, or schedule.
CREATE TABLE {schema}.pauses (
    kind      text        NOT NULL CHECK (kind IN ('consumer', 'channel', 'schedule')),
    name      text        NOT NULL,
    reason    text        NOT NULL,
    paused_by text        NOT NULL,
    paused_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (kind, name)
)
""",
    """
-- What was done in the console, and jobs that were cancelled by a command.
CREATE TABLE {schema}.actions (
    id      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    done_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    done_by text        NOT NULL,
    title   text        NOT NULL,
    command text        NOT NULL
)
""",
    """
-- A worker that still has the old name would be a new consumer, and apply again what the other one has applied.
CREATE TABLE {schema}.former_consumers (
    consumer  text        PRIMARY KEY,
    successor text        NOT NULL,
    ended_at  timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
-- later_shard, later_offset: where the first later record of its key stands that was applied; offset 0: none was.
-- retry_requested_at: a worker of the consumer is to retry it, and has not begun yet.
CREATE TABLE {schema}.dead_letters (
    consumer     text        NOT NULL,
    channel      text        NOT NULL,
    shard        integer     NOT NULL,
    "offset"     bigint      NOT NULL,
    record_id    bigint      NOT NULL,
    key          text        NOT NULL,
    action       text        NOT NULL,
    object       text        NOT NULL,
    data         jsonb       NOT NULL,
    headers      jsonb,
    staged_at    timestamptz NOT NULL,
    reason       text        NOT NULL,
    attempts     integer     NOT NULL,
    parked       boolean     NOT NULL DEFAULT false,
    later_shard  integer,
    later_offset bigint      NOT NULL DEFAULT 0,
    failed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    retry_requested_at timestamptz,
    PRIMARY KEY (consumer, channel, shard, "offset")
)
""",
    """
-- By a hash, because an entry of an index has at most 2,704 bytes; a key of 1,024 characters may have 4,096.
CREATE INDEX dead_letters_key ON {schema}.dead_letters (consumer, channel, shard, hashtextextended(key, 0))
""",
    """
-- The newest first, in pages.
CREATE INDEX dead_letters_failed ON {schema}.dead_letters (failed_at, consumer, channel, shard, "offset")
""",
    """
-- What is to be retried: as a rule nothing.
CREATE INDEX dead_letters_requested ON {schema}.dead_letters (consumer, channel, shard, "offset")
WHERE retry_requested_at IS NOT NULL
""",
    """
-- How far a replay is in a shard says its checkpoint, which retention waits for.
CREATE TABLE {schema}.replays (
    replay   bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request  text        NOT NULL,
    channel  text        NOT NULL,
    target   text        NOT NULL,
    key      text,
    since    timestamptz,
    until    timestamptz,
    shards   integer[]   NOT NULL,
    firsts   bigint[]    NOT NULL,
    lasts    bigint[]    NOT NULL,
    staged   bigint      NOT NULL DEFAULT 0,
    begun_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at timestamptz
)
""",
)

RECONCILING = (
    """
-- Where a consumer stops for a moment.  A barrier expires by the database's clock, so a run that died holds up no consumer.
-- A run that is too late finds the consumer beyond the barrier, and takes another cut.
CREATE TABLE {schema}.barriers (
    consumer   text        NOT NULL,
    channel    text        NOT NULL,
    shard      integer     NOT NULL,
    "offset"   bigint      NOT NULL,
    run        text        NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (consumer, channel, shard, run)
)
""",
    """
-- remaining: the keys that a repair has still to look at, each as JSON text, as the engine writes it; null without a repair.
CREATE TABLE {schema}.reconciliations (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text        NOT NULL,
    consumer   text        NOT NULL,
    intent     text        NOT NULL,
    engine     text        NOT NULL,
    tick       bigint,
    compared   bigint,
    missing    bigint,
    surplus    bigint,
    different  bigint,
    repaired   bigint      NOT NULL DEFAULT 0,
    remaining  text[],
    paused_s   double precision,
    outcome    text        NOT NULL DEFAULT 'running',
    begun_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at   timestamptz
)
""",
    """
CREATE INDEX reconciliations_name ON {schema}.reconciliations (name, id)
""",
    """
-- What a repair found in a row, and what it left there.
CREATE TABLE {schema}.repairs (
    reconciliation bigint      NOT NULL REFERENCES {schema}.reconciliations ON DELETE CASCADE,
    number         bigint      GENERATED ALWAYS AS IDENTITY,
    key            jsonb       NOT NULL,
    kind           text        NOT NULL,
    before         jsonb,
    after          jsonb,
    repaired_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (reconciliation, number)
)
""",
)

# A record that was staged and not applied exists nowhere else.
REFUSAL = """
DO $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.staged_records) OR EXISTS (SELECT FROM {schema}.dead_letters) THEN
        RAISE EXCEPTION 'Penstock''s tables are not dropped: staged_records or dead_letters still hold records'
        USING HINT = 'To lose them on purpose, TRUNCATE {schema}.staged_records, {schema}.dead_letters first';
    END IF;
END
$$
"""

FUNCTIONS = (
    *("cancel_job", "mark_dirty", "stage_job", "stage", "stage_record"),
    *("cancel_jobs", "move_jobs", "finish_records", "check_channel", "journal_entries", "journal_bounds"),
)

TABLES = (
    *(
        "repairs",
        "reconciliations",
        "barriers",
        "replays",
        "dead_letters",
        "former_consumers",
        "actions",
        "pauses",
        "queue_limits",
        "schedules",
        "checkpoints",
    ),
    *(
        "cancellations",
        "job_groups",
        "job_results",
        "job_notes",
        "unique_names",
        "waiting_records",
        "retired_channels",
        "channels",
    ),
    *("troubles", "stopped_shards", "isolated_records", "journal", "ticks", "epochs", "staged_records"),
)

DOMAINS = ("staged_created_at", "staged_object", "staged_action", "staged_key", "staged_channel", "staged_shard")


def upgrade() -> None:
    execute(CREATE_SCHEMA, *STREAMING, *CHANNELS, *STAGING, *CONSUMING, *RECONCILING)


def downgrade() -> None:
    execute("LOCK TABLE {schema}.staged_records", REFUSAL)
    execute(*(f"DROP FUNCTION {{schema}}.{name}" for name in FUNCTIONS))
    execute(*(f"DROP TABLE {{schema}}.{name}" for name in TABLES))
    execute(*(f"DROP DOMAIN {{schema}}.{name}" for name in DOMAINS))
