"""Records that get no offset, and shards that are stopped.

Revision ID: penstock_0006
Revises: penstock_0005
Create Date: 2026-11-22
"""

from penstock.schema.migrating import execute

revision = "penstock_0006"
down_revision = "penstock_0005"
branch_labels = None
depends_on = None

ISOLATED_RECORDS = """
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
"""

STOPPED_SHARDS = """
-- Shards that the streamer leaves out, and why.
CREATE TABLE {schema}.stopped_shards (
    channel    text        NOT NULL,
    shard      integer     NOT NULL,
    reason     text        NOT NULL,
    stopped_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (channel, shard)
)
"""


def upgrade() -> None:
    execute(ISOLATED_RECORDS, STOPPED_SHARDS)


def downgrade() -> None:
    execute("DROP TABLE {schema}.stopped_shards", "DROP TABLE {schema}.isolated_records")
