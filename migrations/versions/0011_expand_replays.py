"""Replays of a log into another channel: what was asked for, and which are done.

Revision ID: penstock_0011
Revises: penstock_0010
Create Date: 2026-11-23
"""

from penstock.schema.migrating import execute

revision = "penstock_0011"
down_revision = "penstock_0010"
branch_labels = None
depends_on = None

# How far a replay is in a shard says its checkpoint, which retention waits for.
REPLAYS = """
CREATE TABLE {schema}.replays (
    replay      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request     text NOT NULL,
    channel     text NOT NULL,
    target      text NOT NULL,
    key         text,
    since       timestamptz,
    until       timestamptz,
    shards      integer[] NOT NULL,
    firsts      bigint[] NOT NULL,
    lasts       bigint[] NOT NULL,
    staged      bigint NOT NULL DEFAULT 0,
    begun_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at    timestamptz
)
"""


def upgrade() -> None:
    execute(REPLAYS)


def downgrade() -> None:
    execute("DROP TABLE {schema}.replays")
