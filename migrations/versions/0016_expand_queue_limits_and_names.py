"""Queues: the limits of tenants as they are declared, and unique names over several shards.

Revision ID: penstock_0016_since_0014
Revises: penstock_0015_since_0014
Create Date: 2026-11-24
"""

from penstock.schema.migrating import execute

revision = "penstock_0016_since_0014"
down_revision = "penstock_0015_since_0014"
branch_labels = None
depends_on = None

# By tenant, "" for the default: {"account-7": {"weight": 3}}.  What an older release registers leaves them as they are.
LIMITS = "ALTER TABLE {schema}.channels ADD COLUMN limits jsonb NOT NULL DEFAULT '{}'"

# Names of a queue with several shards, of which each knows only its own.  `ends` is the end of a window; without one, a name is held
# until its record is done, or `is_queued` and handed over.
NAMES = """
CREATE TABLE {schema}.unique_names (
    channel    text NOT NULL,
    name       text NOT NULL,
    record_id  bigint NOT NULL,
    shard      integer NOT NULL,
    is_queued  boolean NOT NULL,
    ends       timestamptz,
    PRIMARY KEY (channel, name)
)
"""


def upgrade() -> None:
    execute(LIMITS, NAMES)


def downgrade() -> None:
    execute("DROP TABLE {schema}.unique_names")
    execute("ALTER TABLE {schema}.channels DROP COLUMN limits")
