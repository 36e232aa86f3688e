"""The options of ``penstock.ick``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.channels.routing import ick_shard_keys
from penstock.errors import InvalidSetting
from penstock.kinds import checked_name
from penstock.records import Scope, Shard, ShardName
from penstock.spark.sources.options import known_options, parse_scope, redis_url, whole_number
from penstock.spark.sources.shards import number_of_shards

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
