"""Keys that an interrupted repair has still to look at, and the engine that wrote them.

Revision ID: penstock_0008
Revises: penstock_0007
Create Date: 2026-11-23
"""

from penstock.schema.migrating import execute

revision = "penstock_0008"
down_revision = "penstock_0007"
branch_labels = None
depends_on = None

# Each key as JSON text, as the engine writes it; null in runs of older releases, and without a repair.
REMAINING = """
ALTER TABLE {schema}.reconciliations
    ADD COLUMN engine    text,
    ADD COLUMN remaining text[]
"""


def upgrade() -> None:
    execute(REMAINING)


def downgrade() -> None:
    execute("ALTER TABLE {schema}.reconciliations DROP COLUMN engine, DROP COLUMN remaining")
