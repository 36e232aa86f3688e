"""Dead letters know of a later record of their key.

Revision ID: penstock_0015_since_0014
Revises: penstock_0014_since_0013
Create Date: 2026-11-24
"""

from penstock.schema.migrating import execute

revision = "penstock_0015_since_0014"
down_revision = "penstock_0014_since_0013"
branch_labels = None
depends_on = None

# Where the first later record of its key stands that was applied; offset 0: none was.  Null is what an older release writes,
# and has written: then nobody knows.
LATER = """
ALTER TABLE {schema}.dead_letters
    ADD COLUMN later_shard  integer,
    ADD COLUMN later_offset bigint
"""


def upgrade() -> None:
    execute(LATER)


def downgrade() -> None:
    execute("ALTER TABLE {schema}.dead_letters DROP COLUMN later_shard, DROP COLUMN later_offset")
