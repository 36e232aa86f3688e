"""Reads the status from Redis and Postgres."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from psycopg.rows import dict_row

from penstock.channels.channel_kinds import KINDS
from penstock.channels.commands import RedisClient
from penstock.channels.isolation import ShardError, ask_each
from penstock.channels.log.appending import memory_used
from penstock.channels.log.streams import Extent, extents
from penstock.channels.server import connect_redis, find_refusal, redis_errors
from penstock.consuming.checkpoints import UnpassedShard, find_unpassed
from penstock.database.connections import Connection, connect_postgres
from penstock.database.registry import Pause, RegisteredChannel, read_pauses, registered_channels
from penstock.database.statements import name_shards
from penstock.database.store import Store
from penstock.database.transactions import Timeouts
from penstock.declaring.kinds import Channel
from penstock.errors import AppendRefused, PenstockError, SchemaMissing, ServerUnavailable
from penstock.journal.journal_reader import journal_bounds, known_shards
from penstock.operating.consumers import ReaderKind, find_kind
from penstock.operating.status.snapshot import (
    ChannelStatus,
    ConsumerShard,
    ConsumerStatus,
    OpenTransaction,
    RegisteredSchedule,
    ShardStatus,
    Status,
    find_ahead,
)
from penstock.operating.worker_sessions import WorkerSession, read_sessions
from penstock.pipeline import Pipeline
from penstock.reconciling.reconciliation import LastRun, last_runs
from penstock.records import Offset, Scope, Shard, ShardName
from penstock.streaming.faults import Faults, read_faults

MAX_COUNTED = 100_000
"""Most unsequenced records that are counted."""

Row = tuple[Any, ...]
Answer = TypeVar("Answer")


def status(
    store: Store,
    client: RedisClient,
    pipeline: Pipeline | None = None,
    *,
    with_latency: bool = False,
) -> Status:
    """Reads Redis and Postgres; changes nothing.  Latencies cost a probe of each checkpoint."""
    if pipeline is not None:
        store = Store(store.connection, pipeline.scope)
    redis = _Redis(client, store.scope)
    shards = known_shards(store, pipeline.shard_names if pipeline else ())
    log = redis.ask_extents(shards)
    damage, tables = dict(redis.damage), _read_postgres(store, with_latency)
    declared = None if pipeline is None else pipeline.channels
    channels = {**(declared or {}), **tables.registered}
    of_kind: dict[str, list[ShardName]] = defaultdict(list)
    for shard in shards:
        of_kind[channels[shard.channel].kind if shard.channel in channels else "unknown"].append(
            shard
        )
    elsewhere = redis.ask_extents(_find_elsewhere(tables))
    limited = [
        s
        for s in log
        if s.channel in tables.registered and tables.registered[s.channel].redis_memory
    ]
    memory = redis.ask(memory_used, limited)
    sequencer = tables.sequencer
    contents = {
        name: redis.ask(kind.inspect, of_kind[name], sequencer["now_s"])
        for name, kind in KINDS.items()
    }
    redis.note_refusal()
    view = _Shards(tables, declared, log, damage, memory, contents)
    return Status(
        store.scope.schema,
        epoch=sequencer["epoch"],
        tick=sequencer["tick"],
        tick_s=sequencer["tick_s"],
        redis=redis.trouble,
        faults=tables.faults,
        channels=tuple(
            view.build_channel(name, sorted(numbers))
            for name, numbers in sorted(view.numbers().items())
        ),
        consumers=_build_consumers(view, elsewhere, pipeline),
        reconciliations=tables.runs,
        oldest_transaction=None
        if sequencer["pid"] is None
        else OpenTransaction(
            *(sequencer[name] for name in ("pid", "application_name", "state", "age_s"))
        ),
        pauses=tables.pauses,
        schedules=tables.schedules,
        sessions=tables.sessions,
        releases=Counter(sorted(release or "unknown" for release in sequencer["releases"])),
    )


class StatusReader:
    """Reads the status again and again, on connections that it keeps as long as they work."""

    def __init__(
        self,
        pipeline: Pipeline | None,
        database_url: str,
        redis_url: str,
        *,
        application: str,
        timeouts: Timeouts,
        with_latency: bool = False,
    ) -> None:
        """Sets up; the first reading connects."""
        self._pipeline, self._database_url, self._redis_url = pipeline, database_url, redis_url
        self._application, self._timeouts = application, timeouts
        self._with_latency = with_latency
        self._connection: Connection | None = None
        self._client: RedisClient | None = None

    def read(self) -> Status:
        """Returns what ``status`` does."""
        try:
            if self._connection is None or self._connection.closed:
                self._connection = connect_postgres(
                    self._database_url, application=self._application, timeouts=self._timeouts
                )
            return status(
                Store(self._connection),
                self._connected_client(),
                self._pipeline,
                with_latency=self._with_latency,
            )
        except Exception:
            self.close()
            raise

    def is_redis_up(self) -> bool:
        """Returns whether Redis answers, also without Postgres, and before there is a channel."""
        try:
            with redis_errors("measuring"):
                return bool(self._connected_client().ping())
        except PenstockError:
            return False

    def close(self) -> None:
        """Closes the connections; another reading opens them again."""
        for opened in (self._connection, self._client):
            if opened is not None:
                opened.close()
        self._connection = self._client = None

    def _connected_client(self) -> RedisClient:
        self._client = self._client or connect_redis(self._redis_url, timeouts=self._timeouts)
        return self._client


@dataclass(frozen=True, slots=True)
class _Tables:
    """Rows of Postgres, from one snapshot."""

    sequencer: dict[str, Any]
    registered: Mapping[str, RegisteredChannel]
    waiting: Mapping[ShardName, tuple[int, float, int, int]]
    bounds: Mapping[ShardName, tuple[Offset, Offset]]
    progress: list[Row]
    unpassed: Mapping[tuple[str, str], UnpassedShard | None]
    runs: tuple[LastRun, ...]
    faults: Faults
    pauses: tuple[Pause, ...]
    schedules: tuple[RegisteredSchedule, ...]
    sessions: tuple[WorkerSession, ...]


def _read_postgres(store: Store, with_latency: bool) -> _Tables:  # noqa: FBT001  private
    with store.transaction("reading the status"):
        store.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        sequencer = (
            store.connection.cursor(row_factory=dict_row)
            .execute(store["sequencer_state"])
            .fetchone()
        )
        if sequencer is None:
            raise SchemaMissing(
                f"schema {store.scope.schema} has no tick; was it created by hand? Create it "
                "with: penstock init"
            )
        bounds = journal_bounds(store)
        sequenced = {**name_shards(bounds), "firsts": [first for first, _ in bounds.values()]}
        registered = registered_channels(store)
        values = {**sequenced, "with_latency": with_latency}
        progress = store.rows("progress", values, binary=True)
        resharded = {name for name, entry in registered.items() if entry.generations}
        waiting = store.execute("waiting", {**sequencer, "limit": MAX_COUNTED})
        readers = {
            (consumer, channel) for consumer, channel, *_ in progress if channel in resharded
        }
        return _Tables(
            sequencer,
            registered,
            {
                ShardName(channel, Shard(shard)): (staged, age_s, later, due)
                for channel, shard, staged, age_s, later, due in waiting
            },
            bounds,
            progress,
            {reader: find_unpassed(store, *reader) for reader in readers},
            last_runs(store),
            read_faults(store),
            read_pauses(store),
            tuple(_make_schedule(*row) for row in store.execute("schedules", binary=True)),
            read_sessions(store) if sequencer["has_sessions"] else (),
        )


def _make_schedule(*row: Any) -> RegisteredSchedule:
    *values, is_paused, now = row
    schedule = replace(RegisteredSchedule(*values), is_paused=is_paused)
    return replace(schedule, ahead_s=find_ahead(schedule, now))


@dataclass
class _Redis:
    """Asks Redis until it does not answer.

    ``trouble`` is that, or that it refuses writes; ``damage`` has errors of single shards.
    """

    client: RedisClient
    scope: Scope
    trouble: str | None = None
    damage: dict[ShardName, str] = field(default_factory=dict)

    def ask(
        self, read: Callable[..., Mapping[ShardName, Answer]], shards: list[ShardName], *extra: Any
    ) -> Mapping[ShardName, Answer]:
        """Returns the answers of the shards."""
        if self.trouble is not None or not shards:
            return {}
        try:
            return read(self.client, self.scope.namespace, shards, *extra)
        except (ServerUnavailable, AppendRefused) as error:
            self.trouble = str(error)
            return {}

    def note_refusal(self) -> None:
        """Notes that Redis answers, and refuses writes."""
        if self.trouble is not None:
            return
        try:
            self.trouble = find_refusal(self.client)
        except AppendRefused:
            pass  # this user may not ask
        except ServerUnavailable as error:
            self.trouble = str(error)

    def ask_extents(self, shards: list[ShardName]) -> Mapping[ShardName, Extent]:
        """Returns the extents of the shards that can be read."""

        def note(shard: ShardName, error: ShardError) -> None:
            self.damage[shard] = str(error)

        def read(
            client: RedisClient, namespace: str, names: list[ShardName]
        ) -> Mapping[ShardName, Extent]:
            return ask_each(lambda part: extents(client, namespace, part), names, note)

        return self.ask(read, shards)


def _find_elsewhere(tables: _Tables) -> list[ShardName]:
    """Returns the shards of sources that consumers read: neither registered nor journaled here."""
    local = {*tables.registered, *(shard.channel for shard in tables.bounds)}
    remote = {
        ShardName(channel, Shard(shard))
        for _, channel, shard, *_ in tables.progress
        if "@" in channel and channel not in local
    }
    return sorted(remote)


@dataclass(frozen=True, slots=True)
class _Shards:
    """State of all shards; ages are by Postgres' clock, which marks use."""

    tables: _Tables
    declared: Mapping[str, Channel] | None
    log: Mapping[ShardName, Extent]
    damage: Mapping[ShardName, str]
    memory: Mapping[ShardName, int]
    held: Mapping[str, Mapping[ShardName, Any]]  # contents of other kinds' shards, by the kind

    def numbers(self) -> dict[str, set[int]]:
        """Returns the shard numbers of every channel that any source knows."""
        channels = (*(self.declared or {}).values(), *self.tables.registered.values())
        numbers: dict[str, set[int]] = {channel.name: set() for channel in channels}
        declared = (shard for channel in channels for shard in channel.shard_names)
        for shard in (
            *self.tables.waiting,
            *self.tables.bounds,
            *self.log,
            *self.damage,
            *declared,
        ):
            numbers.setdefault(shard.channel, set()).add(shard.shard)
        return numbers

    def build_channel(self, name: str, numbers: list[int]) -> ChannelStatus:
        registered = self.tables.registered.get(name)
        channel = registered or (self.declared or {}).get(name)
        names = frozenset(() if channel is None else channel.shard_names)
        return ChannelStatus(
            name,
            "unknown" if channel is None else channel.kind,
            None if registered is None else registered.keep.total_seconds(),
            None if registered is None else registered.redis_memory,
            declared=None if self.declared is None else name in self.declared,
            shards=tuple(
                self._build_shard(shard, registered, is_known=shard in names)
                for shard in (ShardName(name, Shard(number)) for number in numbers)
            ),
        )

    def _build_shard(
        self, name: ShardName, registered: RegisteredChannel | None, *, is_known: bool
    ) -> ShardStatus:
        count, age_s, in_postgres, _ = self.tables.waiting.get(name, (0, 0.0, 0, 0))
        extent, sequenced = self.log.get(name), self.tables.bounds.get(name, (0, 0))[1]
        ick, queue = (self.held[kind].get(name) for kind in ("ick", "queue"))
        # The one entry of the stream of an Ick, or of a queue, is its position.
        entries, damage = extent if ick is None and queue is None else None, self.damage.get(name)
        if extent is not None and extent.tail > sequenced:
            damage = (
                f"the log ends at offset {extent.tail}, the journal at {sequenced}; see penstock "
                "doctor"
            )
        contents = ick or queue
        return ShardStatus(
            shard=name.shard,
            staged=count,
            staged_s=age_s,
            sequenced=sequenced,
            published=None if extent is None else extent.tail,
            first=entries.first if entries is not None and entries.entries else None,
            records=None if entries is None else entries.records,
            entries=None if entries is None else entries.entries,
            memory=self.memory.get(name),
            redis_memory=None if registered is None else registered.memory_part(name.shard),
            ick=ick,
            queue=queue,
            in_postgres=in_postgres,
            damage=damage if contents is None or contents.damage is None else contents.damage,
            unknown=not is_known,
        )

    def find_lag(self, name: ShardName, read: ConsumerShard) -> ConsumerShard:
        """Returns a checkpoint of a queue with the lag of its jobs.

        The offset stays before a job that is due later, whatever is done after it.
        """
        queue, extent = self.held["queue"].get(name), self.log.get(name)
        if queue is None or (stats := queue.stats) is None or read.unread:
            return read
        sequenced = self.tables.bounds.get(name, (0, 0))[1]
        in_postgres = self.tables.waiting.get(name, (0, 0, 0, 0))[3]
        unpublished = 0 if extent is None else max(0, sequenced - extent.tail)
        lag = min(read.lag, stats.waiting + stats.leased + in_postgres + unpublished)
        return replace(read, lag=lag, lag_s=stats.oldest_s or 0.0 if lag else 0.0)


def _build_consumers(
    view: _Shards, elsewhere: Mapping[ShardName, Extent], pipeline: Pipeline | None
) -> tuple[ConsumerStatus, ...]:
    tables, log = view.tables, view.log
    shards: dict[tuple[str, str], list[ConsumerShard]] = defaultdict(list)
    logs = {name for name, channel in tables.registered.items() if channel.traits.keeps_records}
    kinds: dict[tuple[str, str], ReaderKind] = {}
    for consumer, channel, *columns, is_reported in tables.progress:
        kinds[consumer, channel] = find_kind(consumer, is_reported=is_reported)
        name = ShardName(channel, Shard(columns[0]))
        read = view.find_lag(name, ConsumerShard(*columns))
        if (extent := elsewhere.get(name)) is not None:  # the journal is in another database
            read = replace(read, lag=max(0, extent.tail - read.checkpoint))
        elif (
            channel in logs
            and (extent := log.get(name))
            and read.lag
            and extent.first - 1 > read.checkpoint
        ):
            read = replace(read, evicted=min(read.lag, extent.first - 1 - read.checkpoint))
        predecessor = tables.unpassed.get((consumer, channel))
        if (
            predecessor is not None
            and predecessor.blocks(read.shard)
            and read.lag
            and not read.unread
        ):
            read = replace(read, waiting=read.waiting or predecessor.explain(channel))
        shards[consumer, channel].append(read)
    return tuple(
        ConsumerStatus(
            consumer,
            channel,
            None
            if pipeline is None or kinds[consumer, channel] != "consumer"
            else consumer in pipeline.consumers,
            tuple(checkpoints),
            kinds[consumer, channel],
        )
        for (consumer, channel), checkpoints in shards.items()
    )
