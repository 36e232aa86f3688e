"""Where the journal of a shard begins and ends.

Revision ID: penstock_0004
Revises: penstock_0003
Create Date: 2026-11-22
"""

from penstock.schema.migrating import execute

revision = "penstock_0004"
down_revision = "penstock_0003"
branch_labels = None
depends_on = None

FUNCTION = """
-- First and last offset of a shard's journal; (1, 0) if it is empty.  A view with two parameters: Postgres inlines it
-- into the query that calls it, where each column that is used costs one probe of the primary key.  A view without
-- parameters would need a list of shards, or read the whole journal.
CREATE FUNCTION {schema}.journal_bounds(of_channel text, of_shard integer)
RETURNS TABLE (first_offset bigint, last_offset bigint)
LANGUAGE sql STABLE PARALLEL SAFE ROWS 1
BEGIN ATOMIC
    SELECT coalesce((
               SELECT j.first_offset
               FROM {schema}.journal j
               WHERE j.channel = of_channel AND j.shard = of_shard
               ORDER BY j.first_offset
               LIMIT 1
           ), 1),
           coalesce((
               SELECT j.last_offset
               FROM {schema}.journal j
               WHERE j.channel = of_channel AND j.shard = of_shard
               ORDER BY j.first_offset DESC
               LIMIT 1
           ), 0)
    OFFSET 0;  -- each column is evaluated once, however often the query names it
END
"""


def upgrade() -> None:
    execute(FUNCTION)


def downgrade() -> None:
    execute("DROP FUNCTION {schema}.journal_bounds")
