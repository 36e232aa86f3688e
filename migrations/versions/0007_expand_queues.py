"""Channels of kind queue: their shape, records that wait in Postgres, and the function that finishes a record.

Revision ID: penstock_0007
Revises: penstock_0006
Create Date: 2026-11-22
"""

from penstock.schema.migrating import execute

revision = "penstock_0007"
down_revision = "penstock_0006"
branch_labels = None
depends_on = None

# Null for the other kinds.
SHAPE = """
ALTER TABLE {schema}.channels
    ADD COLUMN streams integer,
    ADD COLUMN hand    integer
"""

WAITING_RECORDS = """
-- Records of queues that Redis is given later than the others, or a second time.
--   tenant    set for a record that Redis has refused, because this tenant has no room
--   due       from when on Redis is given it: up to an hour before it may be handed over
--   is_given  Redis has it, as far as is known: the row stays until the record is finished, so that it can be given again
CREATE TABLE {schema}.waiting_records (
    record_id bigint      PRIMARY KEY,
    channel   text        NOT NULL,
    shard     integer     NOT NULL,
    tenant    text,
    due       timestamptz NOT NULL DEFAULT clock_timestamp(),
    is_given  boolean     NOT NULL DEFAULT false
)
"""

WAITING_DUE = """
CREATE INDEX waiting_records_due ON {schema}.waiting_records (channel, shard, due)
WHERE NOT is_given AND tenant IS NULL
"""

WAITING_TENANTS = """
CREATE INDEX waiting_records_tenants ON {schema}.waiting_records (channel, shard, tenant, record_id)
WHERE NOT is_given AND tenant IS NOT NULL
"""

WAITING_GIVEN = """
CREATE INDEX waiting_records_given ON {schema}.waiting_records (channel, shard, record_id)
WHERE is_given
"""

# The row of a record is what says that its effect is outstanding.  A worker deletes it in the transaction of the effect.  The worker
# that deletes it has done the effect; one that comes second waits for the commit of the first, and finds nothing.
FINISH_RECORDS = """
CREATE FUNCTION {schema}.finish_records(of_channel text, ids bigint[])
RETURNS SETOF bigint
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    WITH outstanding AS MATERIALIZED (
        SELECT r.id
        FROM {schema}.staged_records r
        WHERE r.id = ANY (ids) AND r.channel = of_channel
          AND EXISTS (SELECT FROM {schema}.channels c WHERE c.channel = of_channel AND c.kind = 'queue')
        ORDER BY r.id  -- two workers with the same records lock them in one order
        FOR UPDATE OF r
    )
    DELETE FROM {schema}.staged_records r
    USING outstanding
    WHERE r.id = outstanding.id
    RETURNING r.id;
END
"""

ONLY_GRANTED = "REVOKE ALL ON FUNCTION {schema}.finish_records(text, bigint[]) FROM PUBLIC"


def upgrade() -> None:
    execute(SHAPE, WAITING_RECORDS, WAITING_DUE, WAITING_TENANTS, WAITING_GIVEN, FINISH_RECORDS, ONLY_GRANTED)


def downgrade() -> None:
    execute(
        "DROP FUNCTION {schema}.finish_records",
        "DROP TABLE {schema}.waiting_records",
        "ALTER TABLE {schema}.channels DROP COLUMN streams, DROP COLUMN hand",
    )
