"""Reads the status from Redis and Postgres."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, TypeVar

from penstock.channels.commands import RedisClient
from penstock.channels.ick import ShardState, inspect_shards
from penstock.channels.isolation import ShardError, ask_each
from penstock.channels.log import Extent, extents, memory_used
from penstock.channels.queue.inspection import InspectedShard, inspect_queues
from penstock.consuming.checkpoints import UnpassedShard, find_unpassed
from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import RegisteredChannel, registered_channels
from penstock.database.statements import statements
from penstock.errors import AppendRefused, SchemaMissing, ServerUnavailable
from penstock.journal import journal_bounds, known_shards
from penstock.operating.consumers import ReaderKind, find_kind
from penstock.operating.status.snapshot import (
    ChannelStatus,
    ConsumerShard,
    ConsumerStatus,
    IckStatus,
    OpenTransaction,
    QueueStatus,
    ShardStatus,
    Status,
)
from penstock.pipeline import Pipeline
from penstock.reconciling.history import LastRun, last_runs
from penstock.records import DEFAULT_SCOPE, Offset, Scope, Shard, ShardName
from penstock.streaming.faults import Faults, read_faults

MAX_COUNTED = 100_000
"""Most unsequenced records that are counted."""

Row = tuple[Any, ...]
Answer = TypeVar("Answer")


def status(
    connection: Connection, client: RedisClient, pipeline: Pipeline | None = None, *, scope: Scope = DEFAULT_SCOPE
) -> Status:
    """Reads Redis and Postgres; changes nothing."""
    if pipeline is not None:
        scope = pipeline.scope
    shards = known_shards(connection, scope, pipeline.shard_names if pipeline else ())
    reading = _Reading(client, scope)
    log = reading.ask_extents(shards)
    damage, tables = dict(reading.damage), _read_postgres(connection, scope)
    elsewhere = reading.ask_extents(_find_elsewhere(tables))
    limited = [
        shard for shard in log if (found := tables.registered.get(shard.channel)) and found.redis_memory is not None
    ]
    in_redis = _Answers(
        log,
        damage,
        reading.ask(memory_used, limited),
        reading.ask(inspect_shards, _select(shards, tables, pipeline, "ick")),
        reading.ask(inspect_queues, _select(shards, tables, pipeline, "queue")),
        tables.sequencer.now_s,
    )
    return Status(
        scope.schema,
        epoch=tables.sequencer.epoch,
        tick=tables.sequencer.tick,
        tick_s=tables.sequencer.tick_s,
        redis=reading.trouble,
        faults=tables.faults,
        channels=_Channels(tables, in_redis, pipeline).build(),
        consumers=_build_consumers(replace(tables, progress=[*_add_lags(tables.progress, elsewhere)]), log, pipeline),
        reconciliations=tables.runs,
        oldest_transaction=tables.sequencer.oldest_transaction,
    )


@dataclass(frozen=True, slots=True)
class _Sequencer:
    tick: int
    epoch: int
    tick_s: float
    oldest_transaction: OpenTransaction | None
    now_s: float


@dataclass(frozen=True, slots=True)
class _Tables:
    """Rows of Postgres, from one snapshot."""

    sequencer: _Sequencer
    registered: Mapping[str, RegisteredChannel]
    waiting: list[Row]
    bounds: Mapping[ShardName, tuple[Offset, Offset]]
    progress: list[Row]
    unpassed: Mapping[tuple[str, str], UnpassedShard | None]
    runs: tuple[LastRun, ...]
    faults: Faults
    in_postgres: list[Row]


def _read_postgres(connection: Connection, scope: Scope) -> _Tables:
    sql = statements("penstock.operating", scope.schema)
    with postgres_errors("reading the status"), connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        row = connection.execute(sql["sequencer_state"]).fetchone()
        if row is None:
            raise SchemaMissing(f"schema {scope.schema} has no tick; was it made by hand? Make it with: penstock init")
        tick, epoch, tick_s, following, in_progress, *transaction, now_s = row
        oldest = None if transaction[0] is None else OpenTransaction(*transaction)
        seen = {"next": following, "in_progress": in_progress, "most": MAX_COUNTED}
        bounds = journal_bounds(connection, scope)
        sequenced = {
            "channels": [shard.channel for shard in bounds],
            "shards": [shard.shard for shard in bounds],
            "firsts": [first for first, _ in bounds.values()],
        }
        registered = registered_channels(connection, scope)
        progress = connection.execute(sql["progress"], sequenced, binary=True).fetchall()
        resharded = {name for name, each in registered.items() if each.generations}
        return _Tables(
            _Sequencer(tick, epoch, tick_s, oldest, now_s),
            registered,
            connection.execute(sql["waiting"], seen).fetchall(),
            bounds,
            progress,
            {
                (consumer, channel): find_unpassed(connection, scope, consumer, channel)
                for consumer, channel in {(row[0], row[1]) for row in progress}
                if channel in resharded
            },
            last_runs(connection, scope),
            read_faults(connection, scope),
            connection.execute(sql["in_postgres"]).fetchall(),
        )


@dataclass
class _Reading:
    """Asks Redis, until it does not answer.

    Attributes:
        trouble: Error of Redis; None if it answers.
        damage: Errors of single shards.
    """

    client: RedisClient
    scope: Scope
    trouble: str | None = None
    damage: dict[ShardName, str] = field(default_factory=dict)

    def ask(
        self, read: Callable[[RedisClient, str, list[ShardName]], Mapping[ShardName, Answer]], shards: list[ShardName]
    ) -> Mapping[ShardName, Answer]:
        """The answers of the shards."""
        if self.trouble is not None or not shards:
            return {}
        try:
            return read(self.client, self.scope.namespace, shards)
        except (ServerUnavailable, AppendRefused) as error:
            self.trouble = str(error)
            return {}

    def ask_extents(self, shards: list[ShardName]) -> Mapping[ShardName, Extent]:
        """Those of the shards that can be read."""

        def note(shard: ShardName, error: ShardError) -> None:
            self.damage[shard] = str(error)

        def read(client: RedisClient, namespace: str, each: list[ShardName]) -> Mapping[ShardName, Extent]:
            return ask_each(lambda some: extents(client, namespace, some), each, note)

        return self.ask(read, shards)


def _find_elsewhere(tables: _Tables) -> list[ShardName]:
    """The shards of sources that consumers of this database read: neither registered here nor in this journal."""
    here = {*tables.registered, *(shard.channel for shard in tables.bounds)}
    found = {ShardName(channel, Shard(shard)) for _, channel, shard, *_ in tables.progress}
    return sorted(shard for shard in found if shard.channel not in here and "@" in shard.channel)


def _add_lags(rows: list[Row], elsewhere: Mapping[ShardName, Extent]) -> Iterator[Row]:
    """The rows with their lag behind the log, where the journal is in another database."""
    for row in rows:
        consumer, channel, shard, checkpoint, lag, *rest = row
        extent = elsewhere.get(ShardName(channel, shard))
        behind = lag if extent is None else max(0, extent.tail - checkpoint)
        yield (consumer, channel, shard, checkpoint, behind, *rest)


def _select(shards: list[ShardName], tables: _Tables, pipeline: Pipeline | None, kind: str) -> list[ShardName]:
    """The shards of a kind: by what is registered, otherwise by what is declared."""
    declared = {} if pipeline is None else pipeline.channels
    kinds: dict[str, str] = {name: channel.kind for name, channel in declared.items()}
    kinds.update({name: channel.kind for name, channel in tables.registered.items()})
    return [shard for shard in shards if kinds.get(shard.channel) == kind]


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers of Redis; ages are by Postgres' clock, which marks use."""

    log: Mapping[ShardName, Extent]
    damage: Mapping[ShardName, str]
    memory: Mapping[ShardName, int]
    icks: Mapping[ShardName, ShardState]
    queues: Mapping[ShardName, InspectedShard]
    now_s: float

    def build_queue(self, name: ShardName) -> QueueStatus | None:
        if (queue := self.queues.get(name)) is None:
            return None
        if (stats := queue.stats) is None:
            return QueueStatus(0, 0, 0, 0, None, queue.damage)
        return QueueStatus(stats.waiting, stats.leased, stats.delayed, stats.dead, stats.oldest_s, queue.damage)

    def build_ick(self, name: ShardName) -> IckStatus | None:
        if (ick := self.icks.get(name)) is None:
            return None
        stats = ick.stats
        oldest = stats.total.lowest if stats else None
        return IckStatus(
            dirty=stats.dirty.size if stats else 0,
            reserved=stats.reserved.size if stats else 0,
            held=stats.held.size if stats else 0,
            oldest_s=None if oldest is None or not isfinite(oldest) else max(0.0, self.now_s - oldest),
            records=ick.records,
            dirtied=ick.dirtied,
            coalescing_ratio=ick.records / ick.dirtied if ick.dirtied else None,
            reservation=stats.number if stats else 0,
            holder=(stats.holder or None) if stats else None,
            damage=ick.damage,
        )


class _Channels:
    """Builds the channels from what is registered, declared and in Redis."""

    def __init__(self, tables: _Tables, redis: _Answers, pipeline: Pipeline | None) -> None:
        self._registered = tables.registered
        self._declared = None if pipeline is None else pipeline.channels
        self._staged = {ShardName(channel, shard): (count, age) for channel, shard, count, age in tables.waiting}
        self._sequenced = {shard: last for shard, (_, last) in tables.bounds.items()}
        self._redis = redis
        self._in_postgres = {ShardName(channel, shard): count for channel, shard, count in tables.in_postgres}

    def build(self) -> tuple[ChannelStatus, ...]:
        return tuple(
            self._build_channel(name, sorted(numbers)) for name, numbers in sorted(self._collect_shards().items())
        )

    def _collect_shards(self) -> dict[str, set[int]]:
        """The shard numbers of every channel that any source knows."""
        declared = (s for c in (self._declared or {}).values() for s in c.shard_names)
        numbers: dict[str, set[int]] = defaultdict(set)
        for shard in (*self._staged, *self._sequenced, *self._redis.log, *self._redis.damage, *declared):
            numbers[shard.channel].add(shard.shard)
        for name, channel in self._registered.items():
            numbers[name].update(shard.shard for shard in channel.shard_names)
        return numbers

    def _build_channel(self, name: str, numbers: list[int]) -> ChannelStatus:
        registered = self._registered.get(name)
        known = registered or (self._declared or {}).get(name)
        return ChannelStatus(
            name,
            "unknown" if known is None else known.kind,
            None if registered is None else registered.keep.total_seconds(),
            None if registered is None else registered.redis_memory,
            declared=None if self._declared is None else name in self._declared,
            shards=tuple(self._build_shard(ShardName(name, Shard(n))) for n in numbers),
        )

    def _build_shard(self, name: ShardName) -> ShardStatus:
        count, age_s = self._staged.get(name, (0, 0.0))
        registered = self._registered.get(name.channel)
        extent = self._redis.log.get(name)
        ick, queue = self._redis.build_ick(name), self._redis.build_queue(name)
        # The one entry of the stream of an Ick, or of a queue, is its position.
        entries = extent if ick is None and queue is None else None
        return ShardStatus(
            shard=name.shard,
            staged=count,
            staged_s=age_s,
            sequenced=self._sequenced.get(name, 0),
            published=None if extent is None else extent.tail,
            first=entries.first if entries is not None and entries.entries else None,
            records=None if entries is None else entries.records,
            entries=None if entries is None else entries.entries,
            memory=self._redis.memory.get(name),
            redis_memory=None if registered is None else registered.memory_part(name.shard),
            ick=ick,
            queue=queue,
            in_postgres=self._in_postgres.get(name, 0),
            damage=self._find_damage(name, extent, ick or queue),
            unknown=not self._is_known(name),
        )

    def _find_damage(self, name: ShardName, extent: Extent | None, held: IckStatus | QueueStatus | None) -> str | None:
        if held is not None and held.damage is not None:
            return held.damage
        sequenced = self._sequenced.get(name, 0)
        if extent is not None and extent.tail > sequenced:
            return f"the log ends at offset {extent.tail}, the journal at {sequenced}; see penstock doctor"
        return self._redis.damage.get(name)

    def _is_known(self, shard: ShardName) -> bool:
        """True if a channel is registered, or declared, with this shard."""
        registered = self._registered.get(shard.channel)
        channel = registered or (self._declared or {}).get(shard.channel)
        return channel is not None and shard in channel.shard_names


def _build_consumers(
    tables: _Tables, log: Mapping[ShardName, Extent], pipeline: Pipeline | None
) -> tuple[ConsumerStatus, ...]:
    shards: dict[tuple[str, str], list[ConsumerShard]] = defaultdict(list)
    logs = {name for name, channel in tables.registered.items() if channel.kind == "log"}
    kinds: dict[tuple[str, str], ReaderKind] = {}
    for consumer, channel, *columns, is_reported in tables.progress:
        kinds[consumer, channel] = find_kind(consumer, is_reported=is_reported)
        read = ConsumerShard(*columns)
        if channel in logs and (extent := log.get(ShardName(channel, Shard(read.shard)))):
            evicted = min(read.lag, max(0, extent.first - 1 - read.checkpoint))
            read = replace(read, evicted=evicted)
        before = tables.unpassed.get((consumer, channel))
        if before is not None and before.blocks(read.shard) and read.lag and not read.unread:
            read = replace(read, waiting=read.waiting or before.explain(channel))
        shards[consumer, channel].append(read)
    return tuple(
        ConsumerStatus(
            consumer,
            channel,
            _is_declared(pipeline, consumer, kinds[consumer, channel]),
            tuple(checkpoints),
            kinds[consumer, channel],
        )
        for (consumer, channel), checkpoints in shards.items()
    )


def _is_declared(pipeline: Pipeline | None, consumer: str, kind: ReaderKind) -> bool | None:
    if pipeline is None or kind != "consumer":
        return None
    return consumer in pipeline.consumers
