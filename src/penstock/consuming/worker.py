"""The loop of a consumer's worker: rounds until it is stopped, through servers that are away.

What a round is, the subclasses know: a delivery of records from a log, or of members from an Ick.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Generic, Self, TypedDict, Unpack

import structlog
from typing_extensions import TypeVar  # with a default, which typing has since Python 3.13

from penstock.channels.server import RedisClient, connect_redis, redis_errors
from penstock.consuming.checkpoints import Checkpoints
from penstock.consuming.delivered import Consumed, Delivered
from penstock.consuming.deliverer import Deliverer, Source
from penstock.consuming.failures import NotApplied
from penstock.consuming.transaction import HandlerTransaction, Locked, Plan
from penstock.database.connections import Connection, Database, connect_postgres, get_database_url
from penstock.database.errors import CONFLICTS, describe, postgres_errors
from penstock.database.executor import Executor
from penstock.database.registry import RegisteredChannel, register_consumer
from penstock.database.timeouts import Timeouts
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import PenstockError, ServerUnavailable
from penstock.journal import check_tails, server_start_us
from penstock.pipeline import Pipeline
from penstock.records import ShardName
from penstock.schema.capture import check_triggers
from penstock.schema.revisions import check_revision
from penstock.schema.roles import check_privileges

log = structlog.get_logger("penstock.consumer")

Item = TypeVar("Item", default=Any)

LONGEST_BACKOFF_S = 10.0

BLOCK_MS = 500
"""Longest wait for work, in milliseconds: a stop is noticed within it."""

HALTED_PAUSE_S = 5.0
"""How often a halted shard is looked at again: an operator may have let it go on."""


class WorkerOptions(TypedDict, total=False):
    """What can be chosen of a worker.

    Attributes:
        shards: Numbers of the declared shards to work on; None takes all.  Of a generation of more shards than are declared,
            those beyond go with 0, 1, 2 …: workers that together have all numbers work on all shards.
        prepare: Whether statements may be prepared; behind a pooler none are.
        block_ms: Longest wait for work, in milliseconds: a stop is noticed within it.
        concurrency: Of a queue: jobs at the same time; None takes what the worker declares.
        sources: Of a log that is read from several sources: the URL of each source's Postgres, by the source's name.
        timeouts: Those of a caller that cannot wait as long as a worker.
    """

    shards: Collection[int] | None
    prepare: bool
    block_ms: int
    concurrency: int | None
    sources: Mapping[str, str]
    timeouts: Timeouts | None


class Worker(ABC, Generic[Item]):
    """Runs one consumer over some or all of its shards, in one thread.

        with make_worker(pipeline, consumer, engine, redis_url) as worker:
            worker.drain()

    Attributes:
        consumer: Which consumer.
    """

    consumer: ConsumerSpec

    def __init__(
        self,
        pipeline: Pipeline,
        consumer: ConsumerSpec,
        database: Database,
        redis_url: str,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """Sets up; ``open`` connects.

        Args:
            pipeline: The consumer's pipeline.
            consumer: Which consumer.
            database: Where its effects and checkpoints are: a URL, or an engine whose URL is taken.
            redis_url: Where its channel is.
            **options: See ``WorkerOptions``.
        """
        self.consumer = consumer
        self._pipeline = pipeline
        self._database_url, self._redis_url = get_database_url(database), redis_url
        self._prepare, self._timeouts = options.get("prepare", True), options.get("timeouts")
        self._block_ms = options.get("block_ms", BLOCK_MS)
        self._chosen = options.get("shards")
        self._shards: list[ShardName] = []
        self._channel_shards: frozenset[ShardName] = frozenset()
        self._stop: Callable[[], bool] = lambda: False
        self._most: float = math.inf
        self._transaction: HandlerTransaction | None = None
        self._client: RedisClient = None
        self._rest_until: dict[ShardName, float] = {}
        self._retrying: set[ShardName] = set()
        self._unusable: dict[ShardName, PenstockError] = {}
        self._deliverer: Deliverer[Item] | None = None
        self._has_opened = False
        self._server_start_us: int | None = None

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Connects, and registers the consumer if it is new.

        Raises:
            ServerUnavailable: A server does not answer.
            SchemaMissing: The tables are not there, or of a revision that this release does not work with.
            TriggerMissing: A trigger that a rule declares is not there.
            PrivilegeMissing: The role may not consume; the text has the grants.
            DeclarationError: The pipeline does not fit what is registered.
            HistoryDiverged: Redis has records that Postgres does not know.
        """
        self.close()
        scope = self._pipeline.scope
        with connect_postgres(
            self._database_url,
            application=f"consumer {self.consumer.name}",
            prepare=self._prepare,
            timeouts=self._timeouts,
        ) as connection:
            self._server_start_us = server_start_us(connection, scope)
            check_revision(connection, scope)
            does_jobs = self.consumer.channel.kind == "queue"
            check_privileges(connection, scope, "consumer", does_jobs=does_jobs)
            if not self._has_opened:  # a later release may replace them while this worker runs
                check_triggers(connection, self._pipeline)
            self._register(connection)
            self._registered(connection)
            self._client = connect_redis(self._redis_url, timeouts=self._timeouts)
            self._check_log(connection)
        self._transaction = HandlerTransaction(
            self._pipeline,
            self.consumer,
            self._database_url,
            prepare=self._prepare,
            server_start_us=self._server_start_us,
            timeouts=self._timeouts,
        )
        if self._deliverer is None and (source := self._source()) is not None:
            self._deliverer = Deliverer(self.consumer, scope, source)
        self._has_opened, self._rest_until, self._unusable = True, {}, {}
        log.info("consuming", consumer=self.consumer.name, channel=self.consumer.channel.name, shards=len(self._shards))

    def _take_shards(self, channel: RegisteredChannel) -> None:
        """Chooses the shards to work on, of every generation."""
        declared, names = self.consumer.channel.shards, channel.shard_names
        self._channel_shards = frozenset(names)
        self._shards = [
            names[number]
            for generation in channel.every_generation
            for number in generation.numbers
            if self._chosen is None or (number - generation.first) % declared in self._chosen
        ]

    def _register(self, connection: Connection) -> None:
        """Registers the consumer, so that retention waits for it."""
        self._take_shards(register_consumer(connection, self._pipeline.scope, self.consumer))

    def _check_log(self, connection: Connection) -> None:
        """Compares the log with the journal.  A shard that cannot be compared is left out by the first round that cannot read it."""
        scope = self._pipeline.scope
        check_tails(connection, self._client, scope, self._shards, self._report_unusable)

    def _registered(self, connection: Connection) -> None:
        """The consumer is registered now: what else is to be asked of Postgres at the start."""

    def _source(self) -> Source[Item] | None:
        """Where the items of a shard come from; None for a worker that delivers otherwise."""
        return None

    def close(self) -> None:
        """Closes the connections; what is under way is rolled back, and comes again."""
        if self._transaction is not None:
            self._transaction.close()
        if self._client is not None:
            self._client.close()
        self._transaction = self._client = None

    def _opened(self) -> tuple[HandlerTransaction, Deliverer[Item]]:
        """What a round works with."""
        if self._transaction is None:
            self.open()
        assert self._transaction is not None
        assert self._deliverer is not None
        return self._transaction, self._deliverer

    @abstractmethod
    def round(self, block_ms: int | None = None) -> Consumed:
        """Waits for work, ``block_ms`` at the longest, and does what came."""

    def slice(self, most: int, stop: Callable[[], bool]) -> Consumed:
        """One round that does not wait, and begins nothing more after ``most`` items, or once ``stop()`` is true.

        Any number of processes may take slices, beside workers that run: what one of them has done, another skips.

        Args:
            most: Most records, members or jobs.
            stop: Called between two steps.

        Raises:
            As ``round``; nothing is tried again.
        """
        self._most, self._stop = most, stop
        try:
            with postgres_errors("consuming"), redis_errors("consuming"):
                return self._slice()
        finally:
            self._most, self._stop = math.inf, lambda: False

    def _slice(self) -> Consumed:
        return self.round(block_ms=0)

    def _is_over(self, consumed: Consumed) -> bool:
        """Whether nothing more is to be begun in this round."""
        return consumed.done >= self._most or self._stop()

    @abstractmethod
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        """Rounds until there is nothing more; gives the number of records or members applied."""

    def run(self, stop: Callable[[], bool], report: Callable[[Consumed], None] = lambda _: None) -> None:
        """Rounds until ``stop()`` is true; a server that cannot do it now is asked again, with growing pauses.

        A shard whose keys hold something that Penstock did not write is left out, logged, and read again every few
        seconds; the others go on.

        Raises:
            SchemaMissing: The tables are not there.
            HandlerExited: The handler wants the process to end.
        """
        self._stop = stop
        backoff = 0.0
        try:
            while not stop():
                try:
                    with postgres_errors("consuming"), redis_errors("consuming"):
                        consumed = self.round()
                except (ServerUnavailable, *CONFLICTS) as error:
                    self._close_quietly()
                    backoff = min(LONGEST_BACKOFF_S, max(0.1, backoff * 2))
                    self._warn_waiting(error, backoff)
                    self._pause(backoff)
                else:
                    backoff = 0.0
                    report(consumed)
        finally:
            self._close_quietly()

    def _close_quietly(self) -> None:
        """Closes connections that may be broken."""
        try:
            self.close()
        except Exception as error:  # noqa: BLE001  what it was to end has ended
            log.debug("closing failed", consumer=self.consumer.name, error=type(error).__name__)
            self._transaction = self._client = None

    def _warn_waiting(self, error: Exception, seconds: float) -> None:
        log.warning("waiting", consumer=self.consumer.name, reason=describe(error), seconds=seconds)

    def _note(self, shard: ShardName, delivered: Delivered, busy_pause_s: float) -> None:
        """When to deliver to the shard again.

        Args:
            shard: Which.
            delivered: What was done.
            busy_pause_s: How long to leave a shard alone that another process works on.
        """
        self._retrying.discard(shard)
        if delivered.halted is not None:
            # Not the reason: it may hold what the handler said of a payload.
            log.error("shard halted, see penstock status", consumer=self.consumer.name, shard=str(shard))
            self._rest(shard, HALTED_PAUSE_S)
        elif delivered.retry_after_s is not None:
            self._retrying.add(shard)
            self._rest(shard, delivered.retry_after_s)
        elif delivered.position is None:
            self._rest(shard, busy_pause_s)

    def _leave_out(self, shard: ShardName, error: PenstockError) -> None:
        """Leaves a shard alone for a while whose keys hold something that Penstock did not write; the others go on."""
        self._unusable[shard] = error
        self._report_unusable(shard, error)
        self._rest(shard, HALTED_PAUSE_S)
        self._note_waiting(shard, describe(error))

    def _note_waiting(self, shard: ShardName, reason: str | None) -> None:
        """Writes why a shard waits, for `penstock status`; None: it does no more."""
        assert self._transaction is not None

        def plan(executor: Executor, locked: Locked) -> Plan[None]:
            if shard in locked:
                checkpoints = Checkpoints(self.consumer, self._pipeline.scope)
                checkpoints.note_waiting(executor, shard, reason)
            return Plan(None)

        with suppress(NotApplied):  # `penstock status` can do without
            self._transaction.apply([shard], plan)

    def _report_unusable(self, shard: ShardName, error: PenstockError) -> None:
        log.error(
            "shard unusable",
            consumer=self.consumer.name,
            shard=str(shard),
            reason=describe(error),
            retry_s=HALTED_PAUSE_S,
        )

    def _retry_unusable(self) -> None:
        """Takes shards as usable that are to be read again now."""
        now = monotonic()
        for shard in [s for s in self._unusable if self._rest_until.get(s, 0.0) <= now]:
            del self._unusable[shard]

    def _raise_unusable(self) -> None:
        """Raises the error of a shard that was left out, once nothing is left to do in the others."""
        for error in self._unusable.values():
            raise error

    def _rest(self, shard: ShardName, seconds: float) -> None:
        self._rest_until[shard] = monotonic() + seconds

    def _pause(self, seconds: float) -> bool:
        """Waits; true if the worker is to stop."""
        end = monotonic() + seconds
        while not self._stop() and (left := end - monotonic()) > 0:
            sleep(min(left, 0.05))
        return self._stop()
