"""Runs rounds of a consumer's worker until it is stopped, and through servers that are away.

What a round is, the subclasses know: a delivery of records from a log, of members from an Ick, or
of jobs from a queue.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import structlog
from typing_extensions import override

from penstock.channels.commands import RedisClient
from penstock.channels.isolation import RETRY_EVERY_S, UnusableShards, ask_each
from penstock.channels.server import connect_redis, find_server, redis_errors
from penstock.consuming.checkpoints import Checkpoints
from penstock.consuming.delivery import Consumed, Delivered
from penstock.consuming.failures import NotApplied
from penstock.consuming.handler import WorkerSetup
from penstock.consuming.journals import Journal, LocalJournal
from penstock.consuming.letter_retry import RequestedRetries
from penstock.consuming.transaction import HandlerTransaction
from penstock.database.connections import connect_postgres
from penstock.database.driver_errors import CONFLICTS, describe, postgres_errors
from penstock.database.store import Store
from penstock.database.transactions import WORKER_SILENCE_S
from penstock.declaring.declarations import ConsumerSpec
from penstock.errors import PenstockError, ServerUnavailable
from penstock.journal.lineage import server_start_us
from penstock.logs import Repeats
from penstock.observer import RoundEnded, ServerAway
from penstock.parallel import Runner, pause
from penstock.records import ShardName
from penstock.schema.capture import check_triggers
from penstock.schema.revisions import check_revision
from penstock.schema.roles import check_privileges

log = structlog.get_logger("penstock.consumer")

Answer = TypeVar("Answer")
Ask = Callable[[RedisClient, str, Sequence[ShardName]], Mapping[ShardName, Answer]]

HALTED_PAUSE_S = 5.0
"""Seconds until a halted shard is checked again: an operator may have let it go on."""

PAUSED_CHECK_S = 0.5
"""Seconds between two questions whether a paused consumer was resumed."""


@contextmanager
def _server_errors() -> Iterator[None]:
    """Translates errors of the servers, those of a worker's own transactions among them."""
    with postgres_errors("consuming"), redis_errors("consuming"):
        try:
            yield
        except NotApplied as failed:
            raise failed.error from failed


class Worker(Runner[Consumed]):
    """Runs one consumer over some or all of its shards, in one thread.

    with make_worker(pipeline, consumer, engine, redis_url) as worker:
        worker.drain()
    """

    consumer: ConsumerSpec  # which consumer
    passing = (ServerUnavailable, *CONFLICTS)

    def __init__(self, setup: WorkerSetup, journal: Journal | None = None) -> None:
        """Sets up; ``open`` connects."""
        self._journal = journal or LocalJournal(setup.consumer, setup.shards)
        self._setup, self.consumer, self._scope = setup, setup.consumer, setup.scope
        self.name = setup.consumer.name
        self._checkpoints = Checkpoints(setup.consumer)
        self._shards: list[ShardName] = []
        self._channel_shards: frozenset[ShardName] = frozenset()
        self._max: float = math.inf
        self._transaction: HandlerTransaction | None = None
        self._client: Any = None
        self._rest_until: dict[ShardName, float] = {}
        self._retrying: set[ShardName] = set()
        self._reported_halted: set[ShardName] = set()  # each is logged once
        self._is_paused = False
        self._unusable = UnusableShards(self._say_unusable, self._note_unusable)
        self._repeats = Repeats()
        self._server_start_us: int | None = None
        self._observers, self._away_until = setup.pipeline.observers, 0.0
        self._requested_retries = RequestedRetries(setup.consumer)

    def open(self) -> None:
        """Connects, and registers the consumer if it is new."""
        self.close()
        setup = self._setup
        with connect_postgres(
            setup.database_url,
            application=setup.application,
            prepare=setup.prepare,
            timeouts=setup.timeouts,
            silence_s=WORKER_SILENCE_S,
        ) as connection:
            store = Store(connection, self._scope)
            self._server_start_us = server_start_us(store)
            check_revision(store)
            does_jobs = self.consumer.channel.traits.has_jobs
            check_privileges(store, "consumer", does_jobs=does_jobs)
            if not self._has_opened:  # a later release may replace them while this worker runs
                check_triggers(connection, setup.pipeline)
            self._shards, self._channel_shards = self._journal.register(store)
            self._registered(store)
            self._client = connect_redis(setup.redis_url, timeouts=setup.timeouts)
            self._journal.open(
                store,
                self._client,
                self._shards,
                partial(self._say_unusable, retry_s=RETRY_EVERY_S),
            )
        self._transaction = HandlerTransaction(setup, server_start_us=self._server_start_us)
        self._has_opened, self._rest_until = True, {}
        self._unusable.errors.clear()
        log.info(
            "consuming",
            consumer=self.consumer.name,
            channel=self.consumer.channel.name,
            shard_count=len(self._shards),
        )

    def _registered(self, store: Store) -> None:
        """Reads what else is needed of Postgres at the start."""

    def close(self) -> None:
        """Closes the connections; what is under way is rolled back, and comes again."""
        if self._transaction is not None:
            self._transaction.close()
        if self._client is not None:
            self._client.close()
        self._transaction = self._client = None
        self._journal.close()

    def _opened(self) -> HandlerTransaction:
        """Returns the transaction; connects first if it has to."""
        if self._transaction is None:
            self.open()
        assert self._transaction is not None
        return self._transaction

    def round(self, block_ms: int | None = None) -> Consumed:
        """Waits for work, ``block_ms`` at the longest, and does what came."""
        begun_at = monotonic()
        consumed = self._round(block_ms)
        if self._observers and monotonic() >= self._away_until:
            self._observers(RoundEnded(self.consumer.name, monotonic() - begun_at))
        return consumed

    @abstractmethod
    def _round(self, block_ms: int | None) -> Consumed: ...

    def slice(self, limit: int, stop: Callable[[], bool]) -> Consumed:
        """Runs one round that does not wait.

        It begins nothing more after ``limit`` items, or once ``stop()`` is true.  Any number of
        processes may take slices, beside workers that run: what one of them has done, another
        skips.  Nothing is tried again.
        """
        self._max, self._stop = limit, stop
        try:
            with _server_errors():
                consumed = self._slice()
                self._retry_requested()
                return consumed
        finally:
            self._max, self._stop = math.inf, lambda: False

    def _retry_requested(self) -> None:
        if self._transaction is not None:
            self._requested_retries.retry(self._transaction)

    def _slice(self) -> Consumed:
        return self._round(block_ms=0)

    def _is_over(self, consumed: Consumed) -> bool:
        """Returns whether nothing more is to be begun in this round."""
        return consumed.done >= self._max or self._is_paused or self._stop()

    def _waits_for_resume(self, seconds: float) -> bool:
        """Waits, at most ``seconds``, if the consumer is paused; returns whether it still is."""
        if not self._is_paused:
            return False
        self._pause(min(seconds, PAUSED_CHECK_S))
        assert self._transaction is not None
        self._is_paused = self._transaction.read(self._checkpoints.are_paused)
        if not self._is_paused:
            log.info("resumed", consumer=self.consumer.name)
        return self._is_paused

    @abstractmethod
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        """Runs rounds until there is nothing more.

        Returns the number of records, members or jobs applied.  Halted shards are left as they are,
        and so are all of a paused consumer, and jobs that are due later.  The error of a shard
        whose keys hold something that Penstock did not write is raised once all others are drained.
        """

    @override
    def _next_round(self) -> Consumed:
        with _server_errors():
            consumed = self.round()
            self._retry_requested()
        if monotonic() >= self._away_until:
            self._repeats.end("servers")
        return consumed

    @override
    def _close_quietly(self) -> None:
        """Closes connections that may be broken."""
        try:
            self.close()
        except Exception as error:  # noqa: BLE001  what it was to end has ended
            log.debug("closing failed", consumer=self.consumer.name, error=type(error).__name__)
            self._transaction = self._client = None

    @override
    def _warn_waiting(self, error: Exception, seconds: float) -> None:
        if self._repeats.is_due("servers", reason := describe(error)):
            log.warning("waiting", consumer=self.consumer.name, reason=reason, retry_s=seconds)
        self._away_until = monotonic() + seconds
        self._observers(ServerAway(self.consumer.name, find_server(error), seconds))

    def _note(self, shard: ShardName, delivered: Delivered, busy_pause_s: float) -> None:
        """Sets when to deliver to a shard again.

        ``busy_pause_s`` is the pause if another process works on it.
        """
        self._retrying.discard(shard)
        if delivered.halted is not None:
            # Not the reason: it may hold what the handler said of a payload.
            if shard not in self._reported_halted:
                log.error(
                    "shard halted",
                    consumer=self.consumer.name,
                    shard=str(shard),
                    see="penstock status",
                )
            self._reported_halted.add(shard)
            self._rest(shard, HALTED_PAUSE_S)
            return
        self._reported_halted.discard(shard)
        if delivered.is_paused:
            self._is_paused = True
            log.info("paused", consumer=self.consumer.name, see="penstock status")
        elif delivered.retry_after_s is not None:
            self._retrying.add(shard)
            self._rest(shard, delivered.retry_after_s)
        elif delivered.position is None:
            self._rest(shard, busy_pause_s)

    def _leave_out(self, shard: ShardName, error: PenstockError) -> None:
        """Skips a shard for a while whose keys hold something that Penstock did not write.

        The others go on.
        """
        self._unusable.add(shard, error)

    def _ask_usable(self, ask: Ask[Answer], shards: Iterable[ShardName]) -> dict[ShardName, Answer]:
        """Returns what Redis says of the usable shards among these."""
        usable = [shard for shard in shards if shard not in self._unusable]
        return ask_each(partial(ask, self._client, self._scope.namespace), usable, self._leave_out)

    def _note_waiting(self, shard: ShardName, reason: str | None) -> None:
        """Writes why a shard waits, for `penstock status`; None if it does no more."""
        assert self._transaction is not None
        with suppress(NotApplied):  # `penstock status` can do without
            self._transaction.write(
                shard, lambda store, _: self._checkpoints.note_waiting(store, shard, reason)
            )

    def _say_unusable(self, shard: ShardName, error: PenstockError | None, retry_s: float) -> None:
        names = {"consumer": self.consumer.name, "shard": str(shard)}
        if error is None:
            log.info("shard usable again", **names)
            self._note_waiting(shard, None)
        else:
            log.error("shard unusable", **names, reason=describe(error), retry_s=retry_s)

    def _note_unusable(self, shard: ShardName, error: PenstockError) -> None:
        self._note_waiting(shard, describe(error))

    def _rest(self, shard: ShardName, seconds: float) -> None:
        self._rest_until[shard] = monotonic() + seconds

    def _awake(self, shards: Iterable[ShardName]) -> list[ShardName]:
        """Returns the shards that neither rest nor are left out."""
        now, left_out = monotonic(), self._unusable.is_left_out
        return [
            shard
            for shard in shards
            if self._rest_until.get(shard, 0.0) <= now and not left_out(shard)
        ]

    def _pause(self, seconds: float) -> bool:
        """Waits; returns whether the worker is to stop."""
        return pause(seconds, self._stop)
