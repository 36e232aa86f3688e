"""The registered channels, and what they hold."""

from dataclasses import dataclass

import structlog

from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import registered_channels
from penstock.database.statements import statements
from penstock.declaring.kinds import MAX_SHARDS
from penstock.errors import InvalidSetting, Refused, Unknown
from penstock.pipeline import Pipeline
from penstock.records import DEFAULT_SCOPE, Scope

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class ListedChannel:
    """A registered channel.

    Attributes:
        keep_s: Seconds that records stay after every consumer has passed them.
        entries: Of a log: ``plain``, or how its entries are compressed.
        declared: True if the pipeline declares it; None without a pipeline.
    """

    channel: str
    kind: str
    shards: int
    keep_s: float
    entries: str
    records: int
    consumers: tuple[str, ...]
    declared: bool | None


def list_channels(
    connection: Connection, pipeline: Pipeline | None = None, *, scope: Scope = DEFAULT_SCOPE
) -> list[ListedChannel]:
    """The registered channels, by name."""
    schema = scope.schema if pipeline is None else pipeline.scope.schema
    with postgres_errors("reading the channels"):
        rows = connection.execute(statements("penstock.operating.channels", schema)["list_channels"]).fetchall()
    declared = None if pipeline is None else pipeline.channels.keys()
    return [
        ListedChannel(
            *(name, kind, shards, keep_s, entries, records),
            consumers=tuple(consumers),
            declared=None if declared is None else name in declared,
        )
        for name, kind, shards, keep_s, entries, records, consumers in rows
    ]


def unknown_channel(connection: Connection, scope: Scope, name: str) -> Unknown:
    """The error for a name that is not registered: it lists those that are, and says if it was retired."""
    sql = statements("penstock.operating.channels", scope.schema)
    retired = connection.execute(sql["retired_channel"], {"channel": name}).fetchone()
    now = "" if retired is None else "; it was retired"
    names = ", ".join(sorted(registered_channels(connection, scope)))
    return Unknown(
        f"no channel {name!r} is registered{now}; there are: "
        + (names or "none. A channel is registered by its streamer: penstock stream")
    )


@dataclass(frozen=True, slots=True)
class BehindInShards:
    """A consumer that has to pass records of the present shards before it applies those of the new ones.

    Attributes:
        lag: Records that it has not passed.
        halted: Number of shards in which it is halted: it applies nothing of the new shards before these go on.
    """

    consumer: str
    lag: int
    halted: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """A change of the shards of a log.

    Attributes:
        after: Number of its shards afterwards.
        first_shard: Number of the first of the new shards.
    """

    channel: str
    before: int
    after: int
    first_shard: int
    behind: tuple[BehindInShards, ...]
    applied: bool

    @property
    def changes(self) -> bool:
        """True if there is anything to do."""
        return self.before != self.after


def reshard(
    connection: Connection, channel: str, shards: int, *, apply: bool = False, scope: Scope = DEFAULT_SCOPE
) -> ReshardPlan:
    """Plans another number of shards for a log; with ``apply``, carries it out."""
    if not 1 <= shards <= MAX_SHARDS:
        raise InvalidSetting(f"--shards {shards}: it takes 1 to {MAX_SHARDS}")
    sql, key = statements("penstock.operating", scope.schema), {"channel": channel}
    with postgres_errors(f"changing the shards of {channel}"), connection.transaction():
        # So does the registration of a consumer, which gives it checkpoints in all shards.
        connection.execute(statements("penstock.database", scope.schema)["lock_channel"], key)
        channels = registered_channels(connection, scope)
        if (registered := channels.get(channel)) is None:
            raise unknown_channel(connection, scope, channel)
        if registered.kind != "log":
            raise Refused(
                f"{channel} is of kind {registered.kind}, and only the shards of logs can be changed. Open a channel of another "
                "name, let its consumer work off both, then take the old one out of the pipeline: see docs/how-to/reshard.md"
            )
        if elsewhere := connection.execute(sql["reporting_consumers"], key).fetchall():
            raise Refused(
                f"{channel} is read from another database by {elsewhere[0][0]}, which reads several sources and does not follow a "
                "change of shards: the order of a key would be lost. Stage into a log of another name, which it reads, too"
            )
        rows = connection.execute(sql["behind_in_shards"], key).fetchall()
        plan = ReshardPlan(
            channel,
            registered.every_generation[-1].shards,
            shards,
            registered.total_shards,
            tuple(BehindInShards(*row) for row in rows),
            applied=apply and shards != registered.every_generation[-1].shards,
        )
        if plan.applied:
            first = plan.first_shard
            numbers = {"shards": shards, "first_shard": first, "last_shard": first + shards - 1}
            connection.execute(sql["begin_generation"], {**key, **numbers})
    if plan.applied:
        changed = {"before": plan.before, "after": plan.after, "first_shard": plan.first_shard}
        log.warning("shards changed", channel=channel, **changed)
    return plan
