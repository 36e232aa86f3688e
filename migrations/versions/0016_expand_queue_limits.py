"""Queues: the limits of tenants as they are declared.

Revision ID: penstock_0016_since_0014
Revises: penstock_0015_since_0014
Create Date: 2026-11-24
"""

from penstock.database.migrating import execute

revision = "penstock_0016_since_0014"
down_revision = "penstock_0015_since_0014"
branch_labels = None
depends_on = None

# By tenant, "" for the default: {"account-7": {"weight": 3}}.  What an older release registers leaves them as they are.
LIMITS = "ALTER TABLE {schema}.channels ADD COLUMN limits jsonb NOT NULL DEFAULT '{}'"


def upgrade() -> None:
    execute(LIMITS)


def downgrade() -> None:
    execute("ALTER TABLE {schema}.channels DROP COLUMN limits")
