"""How far everything is: staged, sequenced, published, applied.

Postgres is asked in one transaction, so that its numbers belong together; Redis is asked before it, so that a log at
work is never seen ahead of its journal.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import Any

from penstock.channels.ick import Look, inspect_shards
from penstock.channels.log import Extent, extents
from penstock.channels.server import RedisClient
from penstock.database.connections import Connection, postgres_errors
from penstock.database.registry import RegisteredChannel, registered_channels
from penstock.database.statements import DEFAULT_SCHEMA, statements
from penstock.errors import AppendRefused, ForeignLog, SchemaMissing, ServerUnavailable
from penstock.journal import known_shards
from penstock.pipeline import Pipeline
from penstock.reconciling.history import LastRun, last_runs
from penstock.records import Shard, ShardName

MOST_COUNTED = 100_000
"""Records waiting for the sequencer are counted up to here."""


@dataclass(frozen=True, slots=True)
class IckStatus:
    """What one shard of an Ick holds.

    Attributes:
        dirty: Members that wait (the producer set of Redis::Ick).
        reserved: Members that a plain reserve has set aside (its consumer set).
        held: Members of the fenced reservation.
        oldest_s: How long the oldest of all of these is dirty, in seconds by Postgres' clock, by whose time members are
            marked; None if there is none, or if somebody else has marked it at an infinite time.
        records: Records that it was told, ever.
        dirtied: Members that became dirty by them.
        fold_ratio: Records a member that became dirty; None before the first.
        reservation: Number of the last fenced reservation.
        holder: Who holds it; None if nobody does.
        damage: Why it is not whole; None if it is.
    """

    dirty: int
    reserved: int
    held: int
    oldest_s: float | None
    records: int
    dirtied: int
    fold_ratio: float | None
    reservation: int
    holder: str | None
    damage: str | None

    @property
    def members(self) -> int:
        """All that wait; one that is being worked on and has become dirty again counts twice."""
        return self.dirty + self.reserved + self.held


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard of a channel.

    Attributes:
        shard: Its number.
        staged: Committed records that have no offset yet.
        staged_s: Age of the oldest of these, in seconds.
        sequenced: The journal's last offset.
        published: The last offset that the log has, or that the Ick was told; None if Redis did not say.
        first: Offset of the log's oldest entry; None if it holds none.
        entries: Entries in the log; None of an Ick.
        ick: What an Ick holds; None of a log, and if Redis did not say.
    """

    shard: int
    staged: int
    staged_s: float
    sequenced: int
    published: int | None
    first: int | None
    entries: int | None
    ick: IckStatus | None


@dataclass(frozen=True, slots=True)
class ChannelStatus:
    """One channel.

    Attributes:
        channel: Its name.
        kind: ``log`` or ``ick``.
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
        reconciliations: The last run of each, by name.
        oldest_transaction: None if there is none.
    """

    schema: str
    epoch: int
    tick: int
    tick_s: float
    redis: str | None
    channels: tuple[ChannelStatus, ...]
    consumers: tuple[ConsumerStatus, ...]
    reconciliations: tuple[LastRun, ...]
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
    log, trouble = _extents(client, namespace, shards)
    with postgres_errors("reading the status"), connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        standing = connection.execute(sql["standing"]).fetchone()
        if standing is None:
            raise SchemaMissing(
                f"schema {schema} has no tick; was it made by hand? Make it by: penstock init"
            )
        registered = registered_channels(connection, schema)
        seen = {"next": standing[3], "in_progress": standing[4], "most": MOST_COUNTED}
        waiting = connection.execute(sql["waiting"], seen).fetchall()
        tails = connection.execute(
            statements("penstock.journal", schema)["journal_tails"]
        ).fetchall()
        progress = connection.execute(sql["progress"]).fetchall()
        runs = last_runs(connection, schema)
    kinds = {name: channel.kind for name, channel in registered.items()}
    for channel in pipeline.channels.values() if pipeline is not None else ():
        kinds.setdefault(channel.name, channel.kind)
    looks: dict[ShardName, Look] = {}
    if trouble is None:
        icks = [shard for shard in shards if kinds.get(shard.channel) == "ick"]
        looks, trouble = _looks(client, namespace, icks)
    in_redis = _InRedis(log, looks, now_s=standing[9])
    return Status(
        schema,
        epoch=standing[1],
        tick=standing[0],
        tick_s=standing[2],
        redis=trouble,
        channels=_channels(registered, waiting, tails, in_redis, pipeline),
        consumers=_consumers(progress, pipeline),
        reconciliations=runs,
        oldest_transaction=None if standing[5] is None else OpenTransaction(*standing[5:9]),
    )


def dead_letters_of(status: Status) -> int:
    """How many dead letters there are."""
    return sum(shard.set_aside for consumer in status.consumers for shard in consumer.shards)


def _extents(
    client: RedisClient, namespace: str, shards: list[ShardName]
) -> tuple[dict[ShardName, Extent], str | None]:
    try:
        return (extents(client, namespace, shards) if shards else {}), None
    except (ServerUnavailable, ForeignLog) as error:
        return {}, str(error)


def _looks(
    client: RedisClient, namespace: str, icks: list[ShardName]
) -> tuple[dict[ShardName, Look], str | None]:
    try:
        return (inspect_shards(client, namespace, icks) if icks else {}), None
    except (ServerUnavailable, AppendRefused) as error:
        return {}, str(error)


@dataclass(frozen=True, slots=True)
class _InRedis:
    """What Redis said; scores are told as ages by Postgres' clock, which the marks were made by."""

    log: dict[ShardName, Extent]
    icks: dict[ShardName, Look]
    now_s: float

    def ick(self, name: ShardName) -> IckStatus | None:
        if (look := self.icks.get(name)) is None:
            return None
        stats = look.stats
        oldest = stats.total.lowest if stats else None
        return IckStatus(
            dirty=stats.dirty.size if stats else 0,
            reserved=stats.reserved.size if stats else 0,
            held=stats.held.size if stats else 0,
            oldest_s=None
            if oldest is None or not isfinite(oldest)
            else max(0.0, self.now_s - oldest),
            records=look.records,
            dirtied=look.dirtied,
            fold_ratio=look.records / look.dirtied if look.dirtied else None,
            reservation=stats.number if stats else 0,
            holder=(stats.holder or None) if stats else None,
            damage=look.damage,
        )


def _channels(
    registered: Mapping[str, RegisteredChannel],
    waiting: Iterable[tuple[Any, ...]],
    tails: Iterable[tuple[Any, ...]],
    in_redis: _InRedis,
    pipeline: Pipeline | None,
) -> tuple[ChannelStatus, ...]:
    known = {
        name: (channel.kind, channel.shards, channel.keep.total_seconds())
        for name, channel in registered.items()
    }
    staged = {ShardName(channel, shard): (count, age) for channel, shard, count, age in waiting}
    sequenced = {ShardName(channel, shard): last for channel, shard, _, last in tails}
    declared = {} if pipeline is None else pipeline.channels
    numbers: dict[str, set[int]] = defaultdict(set)
    for shard in (
        *staged,
        *sequenced,
        *in_redis.log,
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
                _shard(ShardName(name, Shard(n)), staged, sequenced, in_redis)
                for n in sorted(numbers[name])
            ),
        )
        for name in sorted(numbers)
    )


def _shard(
    name: ShardName,
    staged: dict[ShardName, tuple[int, float]],
    sequenced: dict[ShardName, int],
    in_redis: _InRedis,
) -> ShardStatus:
    count, age_s = staged.get(name, (0, 0.0))
    extent = in_redis.log.get(name)
    ick = in_redis.ick(name)
    # The one entry of an Ick's stream is its position.
    entries = extent if ick is None else None
    return ShardStatus(
        shard=name.shard,
        staged=count,
        staged_s=age_s,
        sequenced=sequenced.get(name, 0),
        published=None if extent is None else extent.tail,
        first=entries.first if entries is not None and entries.entries else None,
        entries=None if entries is None else entries.entries,
        ick=ick,
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
