"""The options of ``penstock.ick``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.channels.routing import ick_shard_keys
from penstock.database.connections import connect_postgres
from penstock.database.registry import registered_channels
from penstock.declaring.kinds import checked_name
from penstock.errors import InvalidSetting, Unknown
from penstock.records import Scope, Shard, ShardName
from penstock.spark.sources.options import find_database_url, known_options, parse_scope, redis_url, whole_number


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


SOURCE = "penstock.ick"

MEMBERS_A_SHARD = 500
"""Default number of members of a shard in a micro-batch: a script call returns them in a millisecond or two."""

TAKEOVER_AFTER_S = 30
"""Default of ``takeoverAfterSeconds``."""

KNOWN = {
    "channel",
    "key",
    "shards",
    "maxmemberspertrigger",
    "takeoverafterseconds",
    "namespace",
    "schema",
    "redisurl",
    "databaseurl",
}


@dataclass(frozen=True)
class IckOptions:
    """The options of one source or sink.

    Attributes:
        source: ``penstock.ick``.
        channel: Name of the channel; empty with ``key``.
        key: Name of an Ick outside any pipeline; it has one shard.
        shards: Number of the channel's shards; None reads it from Postgres.
        max_members: ``maxMembersPerTrigger``: most members of a micro-batch, over all shards; None takes the default.
        takeover_after_s: ``takeoverAfterSeconds``: another holder's reservation is taken over after so many seconds without a
            heartbeat.
        scope: ``schema`` and ``namespace``.
        redis_url: ``redisUrl``; None takes ``PENSTOCK_REDIS_URL`` from the task's environment.
        database_url: ``databaseUrl``; None takes ``PENSTOCK_DATABASE_URL``.  Used only to read the number of shards.
    """

    source: str
    channel: str
    key: str
    shards: int | None
    max_members: int | None
    takeover_after_s: int
    scope: Scope
    redis_url: str | None
    database_url: str | None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "IckOptions":
        """The options as Spark passes them.

        Raises:
            InvalidSetting: One is unknown, missing, or has an invalid value.
            InvalidName: The channel, the schema or the namespace breaks the rule for names.
        """
        options = known_options(SOURCE, given, KNOWN)
        if ("channel" in options) == ("key" in options):
            raise InvalidSetting(
                f"{SOURCE}: give option channel, the name of a pipeline's Ick, or key, the name of any other Ick"
            )
        if "key" in options and "shards" in options:
            raise InvalidSetting(f"{SOURCE}: option shards is for a channel; a key is one Ick")
        return cls(
            SOURCE,
            checked_name(options["channel"], "channel") if "channel" in options else "",
            options.get("key", ""),
            whole_number(SOURCE, options, "shards", "shards"),
            whole_number(SOURCE, options, "maxmemberspertrigger", "maxMembersPerTrigger"),
            whole_number(SOURCE, options, "takeoverafterseconds", "takeoverAfterSeconds") or TAKEOVER_AFTER_S,
            parse_scope(options),
            options.get("redisurl"),
            options.get("databaseurl"),
        )

    def redis(self) -> str:
        """URL of the Redis that holds the Ick.

        Raises:
            InvalidSetting: Neither the option nor the environment gives it.
        """
        return redis_url(self.source, self.redis_url)

    def names(self) -> dict[int, str]:
        """Names of the Icks, by shard number.

        Raises:
            InvalidSetting: Neither the options nor the environment give the number of shards.
            Unknown: No channel of that name is registered.
            ServerUnavailable: Postgres does not answer.
        """
        if self.key:
            return {0: self.key}
        return {
            number: ick_shard_keys(self.scope.namespace, ShardName(self.channel, Shard(number))).name
            for number in range(number_of_shards(self))
        }

    @property
    def shown(self) -> str:
        """Value of the rows' column ``channel``."""
        return self.channel or self.key
