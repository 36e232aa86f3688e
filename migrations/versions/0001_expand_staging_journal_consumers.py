"""Staged records, the journal, and the checkpoints of consumers.

Revision ID: penstock_0001
Revises:
Create Date: 2026-11-20
"""

from penstock.schema.migrating import CREATE_SCHEMA, execute

revision = "penstock_0001"
down_revision = None
branch_labels = ("penstock",)
depends_on = None

UP = (
    CREATE_SCHEMA,
    """
-- Insert-only for applications.  CACHE 1, because a tick numbers records in the order of their ids: a connection that
-- drew ids ahead would put a later change of a key before an earlier one.
CREATE TABLE {schema}.staged_records (
    id          bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY,
    xid         xid8        NOT NULL DEFAULT pg_current_xact_id(),
    channel     text        NOT NULL,
    shard       integer     NOT NULL,
    key         text        NOT NULL,
    action      text        NOT NULL,
    object      text        NOT NULL,
    data        jsonb       NOT NULL,
    headers     jsonb,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
CREATE INDEX staged_records_xid ON {schema}.staged_records (xid)
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
CREATE TABLE {schema}.channels (
    channel       text        PRIMARY KEY,
    kind          text        NOT NULL,
    shards        integer     NOT NULL,
    keep          interval    NOT NULL,
    registered_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
""",
    """
-- Updated once per batch: free space keeps the updates on the same page.
CREATE TABLE {schema}.checkpoints (
    consumer   text        NOT NULL,
    channel    text        NOT NULL,
    shard      integer     NOT NULL,
    "offset"   bigint      NOT NULL,
    epoch      integer     NOT NULL,
    applied    bigint      NOT NULL DEFAULT 0,
    skipped    bigint      NOT NULL DEFAULT 0,
    dead       bigint      NOT NULL DEFAULT 0,
    halted     text,
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, channel, shard)
) WITH (fillfactor = 25, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
""",
    """
CREATE TABLE {schema}.dead_letters (
    consumer  text        NOT NULL,
    channel   text        NOT NULL,
    shard     integer     NOT NULL,
    "offset"  bigint      NOT NULL,
    record_id bigint      NOT NULL,
    key       text        NOT NULL,
    action    text        NOT NULL,
    object    text        NOT NULL,
    data      jsonb       NOT NULL,
    headers   jsonb,
    staged_at timestamptz NOT NULL,
    reason    text        NOT NULL,
    attempts  integer     NOT NULL,
    parked    boolean     NOT NULL DEFAULT false,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, channel, shard, "offset")
)
""",
    """
CREATE INDEX dead_letters_key ON {schema}.dead_letters (consumer, channel, shard, key)
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


def upgrade() -> None:
    execute(*UP)


def downgrade() -> None:
    execute("LOCK TABLE {schema}.staged_records", REFUSAL)
    for table in ("dead_letters", "checkpoints", "channels", "journal", "ticks", "epochs", "staged_records"):
        execute(f"DROP TABLE {{schema}}.{table}")
