"""Limits of staged records, for writers that do not go through Penstock.

Revision ID: penstock_0005
Revises: penstock_0004
Create Date: 2026-11-22
"""

from penstock.schema.migrating import execute

revision = "penstock_0005"
down_revision = "penstock_0004"
branch_labels = None
depends_on = None

# The lock excludes writers, so the wait for it is bounded: they would queue behind it.  A run that fails changes nothing.
BOUND = "SET LOCAL lock_timeout = '5s'"
UNBOUND = "SET LOCAL lock_timeout TO DEFAULT"

# What staging checks in Python, for INSERTs written by hand.  A record outside these limits has no place in the log: a
# time that no 64 bits or no reader can hold, a shard or a channel that cannot exist.
# NOT VALID: only new rows are checked, so the lock is held for an instant however large the table is.
# A regular expression without repetition: all limits together take a quarter of a microsecond per row.
UP = """
ALTER TABLE {schema}.staged_records
    ADD CONSTRAINT staged_records_channel CHECK (
        length(channel) BETWEEN 1 AND 63 AND channel COLLATE "C" !~ '[^a-z0-9_.-]'
    ) NOT VALID,
    ADD CONSTRAINT staged_records_shard CHECK (shard BETWEEN 0 AND 1023) NOT VALID,
    ADD CONSTRAINT staged_records_key CHECK (length(key) BETWEEN 1 AND 1024) NOT VALID,
    ADD CONSTRAINT staged_records_action CHECK (length(action) BETWEEN 1 AND 255) NOT VALID,
    ADD CONSTRAINT staged_records_object CHECK (length(object) BETWEEN 1 AND 255) NOT VALID,
    ADD CONSTRAINT staged_records_created_at CHECK (
        created_at >= '1900-01-01 00:00:00+00' AND created_at < '2200-01-01 00:00:00+00'
    ) NOT VALID
"""

# In an empty table they are valid at once.
VALIDATE = """
DO $$
BEGIN
    IF pg_relation_size('{schema}.staged_records') = 0 THEN
        ALTER TABLE {schema}.staged_records
            VALIDATE CONSTRAINT staged_records_channel,
            VALIDATE CONSTRAINT staged_records_shard,
            VALIDATE CONSTRAINT staged_records_key,
            VALIDATE CONSTRAINT staged_records_action,
            VALIDATE CONSTRAINT staged_records_object,
            VALIDATE CONSTRAINT staged_records_created_at;
    END IF;
END
$$
"""

DOWN = """
ALTER TABLE {schema}.staged_records
    DROP CONSTRAINT staged_records_channel,
    DROP CONSTRAINT staged_records_shard,
    DROP CONSTRAINT staged_records_key,
    DROP CONSTRAINT staged_records_action,
    DROP CONSTRAINT staged_records_object,
    DROP CONSTRAINT staged_records_created_at
"""


def upgrade() -> None:
    execute(BOUND, UP, VALIDATE, UNBOUND)


def downgrade() -> None:
    execute(BOUND, DOWN, UNBOUND)
