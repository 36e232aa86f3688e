"""What the sources ask Postgres: the shards of channels, and which offsets the journal has."""

from collections.abc import Callable, Collection, Mapping, Sequence

from penstock.database.errors import postgres_errors
from penstock.database.registry import registered_channels
from penstock.database.statements import statements
from penstock.errors import InvalidSetting
from penstock.journal import journal_bounds
from penstock.records import Offset, OffsetRange, Shard, ShardName
from penstock.spark.sources.connections import postgres
from penstock.spark.sources.options import Options

CLOCK_MARGIN_US = 10_000_000
"""A tick may be this much older than a record that it sequenced, because Postgres' clock was set back between them."""


def read_shards(options: Options) -> list[ShardName]:
    """The shards that a query reads, from its options or from Postgres.

    Raises:
        InvalidSetting: Neither the options nor the environment give the number of shards, or the URL of Postgres.
        Unknown: No such channel is registered, or it has no such shard.
        ServerUnavailable: Postgres does not answer.
    """
    subscription, single = options.subscription, options.subscription.single
    if options.shards is not None and single is not None:
        return subscription.resolve(options.source, {single: options.shards})
    if not options.knows_database():
        raise InvalidSetting(f"{options.source}: give option shards, or databaseUrl to look it up in Postgres")
    registered = registered_channels(postgres(options.database()), options.scope)
    return subscription.resolve(
        options.source,
        {
            channel.name: channel.total_shards
            for channel in registered.values()
            if subscription.pattern is None or channel.kind == "log"
        },
    )


def find_grown(
    options: Options,
    known: Sequence[ShardName],
    positions: Mapping[ShardName, int],
    assigned: Callable[[], Mapping[ShardName, Offset]],
) -> list[ShardName] | None:
    """All shards, if there are more than a query knows, and it has read those to their ends; otherwise None.

    So the last record of a key in its old shard comes before the first one in its new shard.

    Args:
        options: Of the query.
        known: The shards that it reads.
        positions: The last offset that it has read of each.
        assigned: Reads the last offset of each; called after the new shards have been seen, when the others get no more records.
    """
    shards = read_shards(options)
    if not set(shards).difference(known):
        return None
    if any(end > positions.get(shard, 0) for shard, end in assigned().items()):
        return None
    return shards


def read_bounds(options: Options, shards: Collection[ShardName]) -> dict[ShardName, OffsetRange]:
    """The journal's first offset and its last, of each shard.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    bounds = journal_bounds(postgres(options.database()), options.scope, shards)
    return {shard: OffsetRange(shard, first, last) for shard, (first, last) in bounds.items()}


def find_sequenced_since(options: Options, times: Mapping[ShardName, int]) -> dict[ShardName, Offset | None]:
    """Offsets before which no record of a shard was staged at its time or later; None if no record was.

    A record is staged before the tick that sequences it, and ticks come in the order of offsets: every record before the
    first tick of that time is older.  A shard whose journal begins after that time is left out: older entries of its log
    may be as new.

    Args:
        options: Of the query.
        times: Microseconds since 1970, by shard.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    named = _name_shards(times)
    since = [us - CLOCK_MARGIN_US for us in times.values()]
    with postgres_errors("reading the journal"):
        rows = postgres(options.database()).execute(_sql(options)["sequenced_since"], {**named, "since_us": since})
        return {
            ShardName(channel, Shard(shard)): None if first is None else Offset(first)
            for channel, shard, oldest, first in rows
            if first is None or first > oldest
        }


def _sql(options: Options) -> dict[str, bytes]:
    return statements("penstock.spark.sources", options.scope.schema)


def _name_shards(shards: Collection[ShardName]) -> dict[str, Sequence[object]]:
    return {"channels": [each.channel for each in shards], "shards": [int(each.shard) for each in shards]}
