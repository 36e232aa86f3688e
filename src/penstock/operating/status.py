"""How far everything is: staged, sequenced, published, applied.

Postgres is asked in one transaction, so that its numbers belong together; Redis is asked before it, so that a log at
work is never seen ahead of its journal.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.channels.log import Extent, extents
from penstock.channels.server import RedisClient
from penstock.errors import ForeignLog, SchemaMissing, ServerUnavailable
from penstock.journal import known_shards
from penstock.pipeline import Pipeline
from penstock.postgres import Connection, answering
from penstock.records import Shard, ShardName
from penstock.statements import DEFAULT_SCHEMA, statements

MOST_COUNTED = 100_000
"""Records waiting for the sequencer are counted up to here."""


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard of a channel.

    Attributes:
        shard: Its number.
        staged: Committed records that have no offset yet.
        staged_s: Age of the oldest of these, in seconds.
        sequenced: The journal's last offset.
        published: The log's last offset; None if Redis did not say.
        first: Offset of the log's oldest entry; None if it holds none.
        entries: Entries in the log.
    """

    shard: int
    staged: int
    staged_s: float
    sequenced: int
    published: int | None
    first: int | None
    entries: int | None


@dataclass(frozen=True, slots=True)
class ChannelStatus:
    """One channel.

    Attributes:
        channel: Its name.
        kind: ``log``.
        keep_s: How long records stay after all consumers have passed them, in seconds; None if it is not registered.
        declared: Whether the pipeline declares it; None if no pipeline was given.
        shards: Its shards.
    """

    channel: str
    kind: str
    keep_s: float | None
    declared: bool | None
    shards: tuple[ShardStatus, ...]


@dataclass(frozen=True, slots=True)
class ConsumerShard:
    """One checkpoint.

    Attributes:
        shard: Number of the shard.
        checkpoint: Everything up to here is applied or set aside.
        lag: Sequenced records beyond it.
        lag_s: Age of the first of these by Postgres' clock, in seconds.
        applied: Records applied.
        skipped: Records that came again, and were skipped.
        dead: Records that were set aside, ever.
        set_aside: Dead letters that are still there.
        halted: Why the shard stands still; None if it does not.
        updated_at: When the checkpoint last moved.
    """

    shard: int
    checkpoint: int
    lag: int
    lag_s: float
    applied: int
    skipped: int
    dead: int
    set_aside: int
    halted: str | None
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """One consumer.

    Attributes:
        consumer: Its name.
        channel: What it reads.
        declared: Whether the pipeline declares it; None if no pipeline was given.
        shards: Its checkpoints.
    """

    consumer: str
    channel: str
    declared: bool | None
    shards: tuple[ConsumerShard, ...]


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is open; records in it have to wait for it, others do not.

    Attributes:
        pid: Of its server process.
        application: What its client calls itself.
        state: ``active``, ``idle in transaction`` ….
        age_s: Since when, in seconds.
    """

    pid: int
    application: str
    state: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Status:
    """All of it.

    Attributes:
        schema: The Penstock schema.
        epoch: Incarnation of the log.
        tick: Number of the sequencer's last round that found something.
        tick_s: How long ago that was, in seconds.
        redis: Why Redis could not be asked; None if it could.
        channels: By name.
        consumers: By name.
        oldest_transaction: None if there is none.
    """

    schema: str
    epoch: int
    tick: int
    tick_s: float
    redis: str | None
    channels: tuple[ChannelStatus, ...]
    consumers: tuple[ConsumerStatus, ...]
    oldest_transaction: OpenTransaction | None

    @property
    def halted(self) -> tuple[tuple[str, ShardName, str], ...]:
        """The consumers' shards that stand still, with the reason."""
        return tuple(
            (consumer.consumer, ShardName(consumer.channel, Shard(shard.shard)), shard.halted)
            for consumer in self.consumers
            for shard in consumer.shards
            if shard.halted is not None
        )


def status(
    connection: Connection,
    client: RedisClient,
    pipeline: Pipeline | None = None,
    *,
    schema: str = DEFAULT_SCHEMA,
    namespace: str = "penstock",
) -> Status:
    """Asks Redis and Postgres; without side effects.

    Args:
        connection: In autocommit mode.
        client: The Redis that holds the log; if it does not answer, the rest is given without it.
        pipeline: Gives schema and namespace, and what is declared; None takes what is registered.
        schema: The Penstock schema, if there is no pipeline.
        namespace: First part of the keys, if there is no pipeline.

    Raises:
        ServerUnavailable: Postgres does not answer.
        SchemaMissing: The tables are not there.
    """
    if pipeline is not None:
        schema, namespace = pipeline.schema, pipeline.namespace
    sql = statements("penstock.operating", schema)
    shards = known_shards(connection, schema, pipeline.shard_names if pipeline else ())
    log, trouble = _log(client, namespace, shards)
    with answering("reading the status"), connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        standing = connection.execute(sql["standing"]).fetchone()
        if standing is None:
            raise SchemaMissing(
                f"schema {schema} has no tick; was it made by hand? Make it by: penstock init"
            )
        registered = connection.execute(sql["channels"]).fetchall()
        seen = {"next": standing[3], "in_progress": standing[4], "most": MOST_COUNTED}
        waiting = connection.execute(sql["waiting"], seen).fetchall()
        tails = connection.execute(
            statements("penstock.journal", schema)["journal_tails"]
        ).fetchall()
        progress = connection.execute(sql["progress"]).fetchall()
    return Status(
        schema,
        epoch=standing[1],
        tick=standing[0],
        tick_s=standing[2],
        redis=trouble,
        channels=_channels(registered, waiting, tails, log, pipeline),
        consumers=_consumers(progress, pipeline),
        oldest_transaction=None if standing[5] is None else OpenTransaction(*standing[5:9]),
    )


def dead_letters_of(status: Status) -> int:
    """How many dead letters there are."""
    return sum(shard.set_aside for consumer in status.consumers for shard in consumer.shards)


def _log(
    client: RedisClient, namespace: str, shards: list[ShardName]
) -> tuple[dict[ShardName, Extent], str | None]:
    try:
        return (extents(client, namespace, shards) if shards else {}), None
    except (ServerUnavailable, ForeignLog) as error:
        return {}, str(error)


def _channels(
    registered: Iterable[tuple[Any, ...]],
    waiting: Iterable[tuple[Any, ...]],
    tails: Iterable[tuple[Any, ...]],
    log: dict[ShardName, Extent],
    pipeline: Pipeline | None,
) -> tuple[ChannelStatus, ...]:
    known = {channel: (kind, shards, keep_s) for channel, kind, shards, keep_s in registered}
    staged = {ShardName(channel, shard): (count, age) for channel, shard, count, age in waiting}
    sequenced = {ShardName(channel, shard): last for channel, shard, _, last in tails}
    declared = {} if pipeline is None else pipeline.channels
    numbers: dict[str, set[int]] = defaultdict(set)
    for shard in (
        *staged,
        *sequenced,
        *log,
        *(s for c in declared.values() for s in c.shard_names),
    ):
        numbers[shard.channel].add(shard.shard)
    for name, (_, count, _) in known.items():
        numbers[name].update(range(count))
    return tuple(
        ChannelStatus(
            name,
            kind=known[name][0]
            if name in known
            else declared[name].kind
            if name in declared
            else "unknown",
            keep_s=known[name][2] if name in known else None,
            declared=None if pipeline is None else name in declared,
            shards=tuple(
                _shard(ShardName(name, Shard(n)), staged, sequenced, log)
                for n in sorted(numbers[name])
            ),
        )
        for name in sorted(numbers)
    )


def _shard(
    name: ShardName,
    staged: dict[ShardName, tuple[int, float]],
    sequenced: dict[ShardName, int],
    log: dict[ShardName, Extent],
) -> ShardStatus:
    count, age_s = staged.get(name, (0, 0.0))
    extent = log.get(name)
    return ShardStatus(
        shard=name.shard,
        staged=count,
        staged_s=age_s,
        sequenced=sequenced.get(name, 0),
        published=None if extent is None else extent.tail,
        first=extent.first if extent is not None and extent.entries else None,
        entries=None if extent is None else extent.entries,
    )


def _consumers(
    rows: Iterable[tuple[Any, ...]], pipeline: Pipeline | None
) -> tuple[ConsumerStatus, ...]:
    shards: dict[tuple[str, str], list[ConsumerShard]] = defaultdict(list)
    for (
        consumer,
        channel,
        shard,
        at,
        lag,
        lag_s,
        applied,
        skipped,
        dead,
        halted,
        updated_at,
        set_aside,
    ) in rows:
        shards[consumer, channel].append(
            ConsumerShard(
                shard,
                at,
                lag,
                lag_s,
                applied,
                skipped,
                dead,
                set_aside=set_aside,
                halted=halted,
                updated_at=updated_at,
            )
        )
    return tuple(
        ConsumerStatus(
            consumer,
            channel,
            None if pipeline is None else consumer in pipeline.consumers,
            tuple(found),
        )
        for (consumer, channel), found in shards.items()
    )
