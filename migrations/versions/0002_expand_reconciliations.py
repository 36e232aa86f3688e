"""Barriers, runs of reconcile, and what they repaired.

Revision ID: penstock_0002
Revises: penstock_0001
Create Date: 2026-11-21
"""

from penstock.schema.migrating import execute

revision = "penstock_0002"
down_revision = "penstock_0001"
branch_labels = None
depends_on = None

UP = (
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
CREATE TABLE {schema}.reconciliations (
    id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text        NOT NULL,
    consumer   text        NOT NULL,
    intent     text        NOT NULL,
    tick       bigint,
    compared   bigint,
    missing    bigint,
    surplus    bigint,
    different  bigint,
    repaired   bigint      NOT NULL DEFAULT 0,
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


def upgrade() -> None:
    execute(*UP)


def downgrade() -> None:
    for table in ("repairs", "reconciliations", "barriers"):
        execute(f"DROP TABLE {{schema}}.{table}")
