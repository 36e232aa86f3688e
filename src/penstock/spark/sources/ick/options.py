"""What can be chosen of ``penstock.ick``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.channels.routing import ick_shard_keys
from penstock.database.statements import DEFAULT_SCHEMA
from penstock.declarations import checked_name, checked_schema
from penstock.errors import InvalidSetting
from penstock.records import Shard, ShardName
from penstock.spark.sources.options import known_options, redis_url, whole_number
from penstock.spark.sources.shards import number_of_shards

SOURCE = "penstock.ick"

MEMBERS_A_SHARD = 500
"""Members of a shard in a micro-batch by default: what a script call gives out within a millisecond or two."""

PATIENCE_S = 30
"""How long another's reservation may stand still before it is taken over, by default."""

KNOWN = {
    "channel",
    "key",
    "shards",
    "maxmemberspertrigger",
    "patienceseconds",
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
        key: An Ick that is no pipeline's, by its name; it has one shard.
        shards: Number of the channel's shards; None asks Postgres.
        max_members: ``maxMembersPerTrigger``: most members of a micro-batch, over all shards; None takes the default.
        patience_s: ``patienceSeconds``: how long another's reservation may stand still before it is taken over.
        namespace: First part of a channel's keys in Redis.
        schema: The Penstock schema in Postgres.
        redis_url: ``redisUrl``, or ``PENSTOCK_REDIS_URL`` of the task's environment.
        database_url: ``databaseUrl``, or ``PENSTOCK_DATABASE_URL``: asked for the number of shards, and nothing else.
    """

    source: str
    channel: str
    key: str
    shards: int | None
    max_members: int | None
    patience_s: int
    namespace: str
    schema: str
    redis_url: str | None
    database_url: str | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "IckOptions":
        """The options as Spark hands them over.

        Raises:
            InvalidSetting: One is unknown, missing, or cannot be what it is.
            InvalidName: The channel, the schema or the namespace breaks the rule for names.
        """
        options = known_options(SOURCE, given, KNOWN)
        if ("channel" in options) == ("key" in options):
            raise InvalidSetting(
                f"{SOURCE}: give option channel, the name of a pipeline's Ick, or key, the name of any other"
            )
        if "key" in options and "shards" in options:
            raise InvalidSetting(f"{SOURCE}: option shards is for a channel; a key is one Ick")
        return cls(
            SOURCE,
            checked_name(options["channel"], "channel") if "channel" in options else "",
            options.get("key", ""),
            whole_number(SOURCE, options, "shards", "shards"),
            whole_number(SOURCE, options, "maxmemberspertrigger", "maxMembersPerTrigger"),
            whole_number(SOURCE, options, "patienceseconds", "patienceSeconds") or PATIENCE_S,
            checked_schema(options.get("namespace", "penstock")),
            checked_schema(options.get("schema", DEFAULT_SCHEMA)),
            options.get("redisurl"),
            options.get("databaseurl"),
        )

    def redis(self) -> str:
        """Where the Ick is.

        Raises:
            InvalidSetting: Neither the option nor the environment says it.
        """
        return redis_url(self.source, self.redis_url)

    def names(self) -> dict[int, str]:
        """The Icks, by the number of their shard.

        Raises:
            InvalidSetting: Nothing says how many there are.
            Unknown: No channel of that name is registered.
            ServerUnavailable: Postgres does not answer.
        """
        if self.key:
            return {0: self.key}
        return {
            number: ick_shard_keys(self.namespace, ShardName(self.channel, Shard(number))).name
            for number in range(number_of_shards(self))
        }

    @property
    def shown(self) -> str:
        """What rows say of where they come from."""
        return self.channel or self.key
