"""Logs of several sources: their names, and the checkpoints of consumers elsewhere.

Revision ID: penstock_0013
Revises: penstock_0012
Create Date: 2026-11-23
"""

from penstock.schema.migrating import execute

revision = "penstock_0013"
down_revision = "penstock_0012"
branch_labels = None
depends_on = None

# In the database of the consumer: the source that a checkpoint belongs to, and the record at it, by its number and the time
# of its staging: the source's journal must still have that record there.
# In the database of the source: the database of the consumer that reports the checkpoint.
CHECKPOINTS = """
ALTER TABLE {schema}.checkpoints
    ADD COLUMN source text,
    ADD COLUMN record_id bigint,
    ADD COLUMN staged_us bigint,
    ADD COLUMN reported_by text
"""


# The locks exclude workers and writers, so the wait for them is bounded: they would queue behind it.  A run that fails changes nothing.
BOUND = "SET LOCAL lock_timeout = '5s'"
UNBOUND = "SET LOCAL lock_timeout TO DEFAULT"

# The name of a source's log: rides@eu.  NOT VALID: only new rows are checked, and the old ones kept a stricter rule.
NAMES = """
ALTER TABLE {schema}.staged_records
    DROP CONSTRAINT IF EXISTS staged_records_channel,
    ADD CONSTRAINT staged_records_channel CHECK (
        length(channel) BETWEEN 1 AND 63 AND channel COLLATE "C" !~ '[^a-z0-9_.@-]'
    ) NOT VALID
"""

# In an empty table it is valid at once.
VALIDATE = """
DO $$
BEGIN
    IF pg_relation_size('{schema}.staged_records') = 0 THEN
        ALTER TABLE {schema}.staged_records VALIDATE CONSTRAINT staged_records_channel;
    END IF;
END
$$
"""

OLD_NAMES = NAMES.replace("_.@-", "_.-")


def upgrade() -> None:
    execute(BOUND, CHECKPOINTS, NAMES, VALIDATE, UNBOUND)


def downgrade() -> None:
    execute(
        BOUND,
        "ALTER TABLE {schema}.checkpoints "
        "DROP COLUMN source, DROP COLUMN record_id, DROP COLUMN staged_us, DROP COLUMN reported_by",
        OLD_NAMES,
        VALIDATE,
        UNBOUND,
    )
