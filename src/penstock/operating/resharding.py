"""Changes the number of shards of a log while it is used.

The new shards are a generation of their own, with numbers that were never used, so that every shard keeps its offsets for
ever.  The next tick puts new records there, by the hash of their keys alone: what number of shards an application declares
no longer matters.  The shards of earlier generations get no more records, and a consumer applies what is in a generation
once it has passed the ones before.  So a key keeps its order, although it changes its shard.
"""

from dataclasses import dataclass

import structlog

from penstock.database.connections import Connection
from penstock.database.errors import postgres_errors
from penstock.database.registry import registered_channels
from penstock.database.statements import statements
from penstock.declaring.kinds import MAX_SHARDS
from penstock.errors import InvalidSetting, Refused
from penstock.operating.channels import unknown_channel
from penstock.records import DEFAULT_SCOPE, Scope

log = structlog.get_logger("penstock.operator")


@dataclass(frozen=True, slots=True)
class BehindInShards:
    """A consumer that has to pass records of the present shards before it applies those of the new ones.

    Attributes:
        consumer: Its name.
        lag: Records that it has not passed.
        halted: Number of shards in which it is halted: it applies nothing of the new shards before these go on.
    """

    consumer: str
    lag: int
    halted: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """How the shards of a log change.

    Attributes:
        channel: The log.
        before: Number of its shards now.
        after: Number of its shards afterwards.
        first_shard: Number of the first of the new shards.
        behind: Its consumers.
        applied: Whether it was carried out.
    """

    channel: str
    before: int
    after: int
    first_shard: int
    behind: tuple[BehindInShards, ...]
    applied: bool

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return self.before != self.after


def reshard(
    connection: Connection, channel: str, shards: int, *, apply: bool = False, scope: Scope = DEFAULT_SCOPE
) -> ReshardPlan:
    """Plans another number of shards for a log; with ``apply``, carries it out.

    Args:
        connection: In autocommit mode.
        channel: Name of the log.
        shards: Number of its shards from the next tick on.
        apply: Carry the plan out.
        scope: Of the pipeline.

    Raises:
        Unknown: No channel of that name is registered.
        Refused: It is no log, or a consumer in another database reads it.
        InvalidSetting: ``shards`` is out of range.
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
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
        log.warning(
            "shards changed", channel=channel, before=plan.before, after=plan.after, first_shard=plan.first_shard
        )
    return plan
