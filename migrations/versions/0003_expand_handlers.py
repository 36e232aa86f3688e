"""What a shard waits for, dead letters in a row, and an index of dead letters that takes a key of any length.

Revision ID: penstock_0003
Revises: penstock_0002
Create Date: 2026-11-22
"""

from penstock.schema.migrating import execute

revision = "penstock_0003"
down_revision = "penstock_0002"
branch_labels = None
depends_on = None

# An entry of an index has at most 2,704 bytes; a key of 1,000 characters may have 4,000.
UP = (
    """
ALTER TABLE {schema}.checkpoints
    ADD COLUMN waiting         text,
    ADD COLUMN dead_in_a_row   bigint NOT NULL DEFAULT 0,
    ADD COLUMN applied_at_dead bigint
""",
    """
DROP INDEX {schema}.dead_letters_key
""",
    """
CREATE INDEX dead_letters_key ON {schema}.dead_letters (consumer, channel, shard, hashtextextended(key, 0))
""",
)

DOWN = (
    """
DROP INDEX {schema}.dead_letters_key
""",
    """
CREATE INDEX dead_letters_key ON {schema}.dead_letters (consumer, channel, shard, key)
""",
    """
ALTER TABLE {schema}.checkpoints
    DROP COLUMN waiting,
    DROP COLUMN dead_in_a_row,
    DROP COLUMN applied_at_dead
""",
)


def upgrade() -> None:
    execute(*UP)


def downgrade() -> None:
    execute(*DOWN)
