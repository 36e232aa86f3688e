"""Channels of kind log: how much memory Redis may use for them.

Revision ID: penstock_0012
Revises: penstock_0011
Create Date: 2026-11-23
"""

from penstock.schema.migrating import execute

revision = "penstock_0012"
down_revision = "penstock_0011"
branch_labels = None
depends_on = None

# In bytes, for the streams of all shards together; null sets no limit.
REDIS_MEMORY = "ALTER TABLE {schema}.channels ADD COLUMN redis_memory bigint"


def upgrade() -> None:
    execute(REDIS_MEMORY)


def downgrade() -> None:
    execute("ALTER TABLE {schema}.channels DROP COLUMN redis_memory")
