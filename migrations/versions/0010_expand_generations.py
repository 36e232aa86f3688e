"""Channels whose number of shards has changed: the shards of each generation.

Revision ID: penstock_0010
Revises: penstock_0009
Create Date: 2026-11-23
"""

from penstock.schema.migrating import execute

revision = "penstock_0010"
down_revision = "penstock_0009"
branch_labels = None
depends_on = None

# `shards` stays the number of the first generation, `generations` has those of the later ones, and `first_shard` is where the
# newest begins: 4, {6,3} and 10 are the shards 0-3, 4-9 and 10-12.
GENERATIONS = """
ALTER TABLE {schema}.channels
    ADD COLUMN generations integer[] NOT NULL DEFAULT '{}',
    ADD COLUMN first_shard integer   NOT NULL DEFAULT 0
"""

BY_GENERATION = "ALTER TABLE {schema}.ticks ADD COLUMN by_generation boolean NOT NULL DEFAULT false"

# A sequencer of an older release would go on to fill the shards of the first generation.
FUNCTION = """
CREATE FUNCTION {schema}.refuse_tick_of_older_release() RETURNS trigger
LANGUAGE plpgsql
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

TRIGGER = """
CREATE TRIGGER refuse_tick_of_older_release BEFORE INSERT ON {schema}.ticks
FOR EACH ROW WHEN (NOT NEW.by_generation)
EXECUTE FUNCTION {schema}.refuse_tick_of_older_release()
"""


def upgrade() -> None:
    for statement in (GENERATIONS, BY_GENERATION, FUNCTION, TRIGGER):
        execute(statement)


def downgrade() -> None:
    execute("DROP TRIGGER refuse_tick_of_older_release ON {schema}.ticks")
    execute("DROP FUNCTION {schema}.refuse_tick_of_older_release")
    execute("ALTER TABLE {schema}.ticks DROP COLUMN by_generation")
    execute("ALTER TABLE {schema}.channels DROP COLUMN generations, DROP COLUMN first_shard")
