"""The number of shards of a channel: from the option, or as registered in Postgres."""

from typing import Protocol

from penstock.database.connections import connect_postgres
from penstock.database.registry import registered_channels
from penstock.errors import InvalidSetting, Unknown
from penstock.records import Scope
from penstock.spark.sources.options import find_database_url


class Sharded(Protocol):
    """The options that identify a channel.

    Attributes:
        source: Name of the data source.
        channel: Name of the channel.
        shards: Number of its shards; None reads it from Postgres.
        scope: Of the pipeline.
        database_url: URL of Postgres; None takes it from the environment.
    """

    @property
    def source(self) -> str: ...  # noqa: D102  above
    @property
    def channel(self) -> str: ...  # noqa: D102  above
    @property
    def shards(self) -> int | None: ...  # noqa: D102  above
    @property
    def scope(self) -> Scope: ...  # noqa: D102  above
    @property
    def database_url(self) -> str | None: ...  # noqa: D102  above


def number_of_shards(options: Sharded) -> int:
    """The number of shards of the channel in the options.

    Raises:
        InvalidSetting: Neither the options nor the environment give it, or the URL of Postgres.
        Unknown: No channel of that name is registered.
        ServerUnavailable: Postgres does not answer.
    """
    if options.shards is not None:
        return options.shards
    url = find_database_url(options.source, options.database_url)
    if url is None:
        raise InvalidSetting(f"{options.source}: give option shards, or databaseUrl to look it up in Postgres")
    with connect_postgres(url, application="spark") as connection:
        registered = registered_channels(connection, options.scope).get(options.channel)
    if registered is None:
        raise Unknown(
            f"{options.source}: no channel {options.channel!r} is registered in schema {options.scope.schema}; "
            "a streamer registers it when it starts"
        )
    return registered.total_shards
