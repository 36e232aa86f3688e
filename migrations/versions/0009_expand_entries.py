"""Channels of kind log: how their entries hold records.

Revision ID: penstock_0009
Revises: penstock_0008
Create Date: 2026-11-23
"""

from penstock.schema.migrating import execute

revision = "penstock_0009"
down_revision = "penstock_0008"
branch_labels = None
depends_on = None

# 'plain' is an entry a record; otherwise a batch of records an entry, compressed with what is named: 'none' or 'zstd'.
ENTRIES = "ALTER TABLE {schema}.channels ADD COLUMN entries text NOT NULL DEFAULT 'plain'"


def upgrade() -> None:
    execute(ENTRIES)


def downgrade() -> None:
    execute("ALTER TABLE {schema}.channels DROP COLUMN entries")
