"""Names of channels and consumers that are renamed or retired, and the question of a producer how a channel is registered.

Revision ID: penstock_0014_since_0013
Revises: penstock_0013
Create Date: 2026-11-23
"""

from penstock.database.migrating import execute

revision = "penstock_0014_since_0013"
down_revision = "penstock_0013"
branch_labels = None
depends_on = None

FORMER_CHANNELS = """
-- Names that no channel may be registered with any more.  Records that are still staged for them are those of the
-- successor; null after the channel was retired: nothing may be staged for it.
CREATE TABLE {schema}.former_channels (
    channel   text        PRIMARY KEY,
    successor text,
    ended_at  timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""

# A producer may not read the tables; everyone who may use the schema may call this, so that an upgrade needs no new grant.
# No row: a channel that is not registered yet.  `fits`: a channel that is declared with this kind and number of shards may be
# used.  Every number that the channel has had will do: since it was changed, the key decides the shard, when the record is
# sequenced.
CHECK_CHANNEL = """
CREATE FUNCTION {schema}.check_channel(of_channel text, of_kind text, of_shards integer)
RETURNS TABLE (kind text, shards integer, fits boolean, is_former boolean, successor text)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT c.kind, (c.shards || c.generations)[1 + cardinality(c.generations)],
           c.kind = of_kind AND of_shards = ANY (c.shards || c.generations),
           f.channel IS NOT NULL,
           f.successor
    FROM (SELECT of_channel AS channel) asked
    LEFT JOIN {schema}.former_channels f ON f.channel = asked.channel
    LEFT JOIN {schema}.channels c ON c.channel = coalesce(f.successor, asked.channel)
    WHERE f.channel IS NOT NULL OR c.channel IS NOT NULL;
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

# A sequencer of an older release would go on to place records by the old name, where nobody reads them.  SECURITY DEFINER: the
# role of such a release may not read `former_channels`.
REFUSE_TICK = """
CREATE OR REPLACE FUNCTION {schema}.refuse_tick_of_older_release() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.channels WHERE generations <> '{}')
       OR EXISTS (SELECT FROM {schema}.former_channels WHERE successor IS NOT NULL) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'feature_not_supported',
            MESSAGE = 'penstock: a channel was renamed, or its number of shards was changed, which this release does not know',
            HINT = 'pip install --upgrade penstock, wherever a streamer runs';
    END IF;
    RETURN NEW;
END
$$
"""

REFUSE_TICK_BEFORE = """
CREATE OR REPLACE FUNCTION {schema}.refuse_tick_of_older_release() RETURNS trigger
LANGUAGE plpgsql SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF EXISTS (SELECT FROM {schema}.channels WHERE generations <> '{}') THEN
        RAISE EXCEPTION USING
            ERRCODE = 'feature_not_supported',
            MESSAGE = 'penstock: the number of shards of a channel was changed, which this release does not know',
            HINT = 'pip install --upgrade penstock, wherever a streamer runs';
    END IF;
    RETURN NEW;
END
$$
"""


def upgrade() -> None:
    execute(FORMER_CHANNELS, CHECK_CHANNEL, FORMER_CONSUMERS, REFUSE_TICK)


def downgrade() -> None:
    execute(
        REFUSE_TICK_BEFORE,
        "DROP TABLE {schema}.former_consumers",
        "DROP FUNCTION {schema}.check_channel",
        "DROP TABLE {schema}.former_channels",
    )
