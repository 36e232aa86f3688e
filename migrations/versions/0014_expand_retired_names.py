"""Names of channels that are retired and of consumers that are renamed, and the question of a producer how a channel is registered.

Revision ID: penstock_0014_since_0013
Revises: penstock_0013
Create Date: 2026-11-23
"""

from penstock.schema.migrating import execute

revision = "penstock_0014_since_0013"
down_revision = "penstock_0013"
branch_labels = None
depends_on = None

RETIRED_CHANNELS = """
-- Names that no channel may be registered with any more, and nothing may be staged for.
CREATE TABLE {schema}.retired_channels (
    channel    text        PRIMARY KEY,
    retired_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""

# A producer may not read the tables; everyone who may use the schema may call this, so that an upgrade needs no new grant.
# No row: a channel that is not registered yet.  `fits`: a channel that is declared with this kind and number of shards may be
# used.  Every number that the channel has had will do: since it was changed, the key decides the shard, when the record is
# sequenced.
CHECK_CHANNEL = """
CREATE FUNCTION {schema}.check_channel(of_channel text, of_kind text, of_shards integer)
RETURNS TABLE (kind text, shards integer, fits boolean, is_retired boolean)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT c.kind, (c.shards || c.generations)[1 + cardinality(c.generations)],
           c.kind = of_kind AND of_shards = ANY (c.shards || c.generations),
           r.channel IS NOT NULL
    FROM (SELECT of_channel AS channel) asked
    LEFT JOIN {schema}.retired_channels r ON r.channel = asked.channel
    LEFT JOIN {schema}.channels c ON c.channel = asked.channel
    WHERE r.channel IS NOT NULL OR c.channel IS NOT NULL;
END
"""


# A worker that still has the old name would be a new consumer, and apply again what the other one has applied.
FORMER_CONSUMERS = """
CREATE TABLE {schema}.former_consumers (
    consumer  text        PRIMARY KEY,
    successor text        NOT NULL,
    ended_at  timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""


def upgrade() -> None:
    execute(RETIRED_CHANNELS, CHECK_CHANNEL, FORMER_CONSUMERS)


def downgrade() -> None:
    execute(
        "DROP TABLE {schema}.former_consumers",
        "DROP FUNCTION {schema}.check_channel",
        "DROP TABLE {schema}.retired_channels",
    )
