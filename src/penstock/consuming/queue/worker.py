"""The worker of a queue: reads jobs as lanes become free, and gives back at once what it has not begun when it stops.

Its own thread reads and looks after the lanes; the lanes work; one thread settles leases and one extends them, so that
neither a handler that hangs nor a Redis that does not answer stops the others.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any, Unpack

import structlog
from typing_extensions import override

from penstock.channels.isolation import isolated
from penstock.channels.queue.running import run as run_steps
from penstock.channels.queue.shape import QueueShape, worker_name
from penstock.clients.queue import Lease, Reader
from penstock.clients.queue.leases import pause_s
from penstock.consuming.checkpoints import Checkpoints
from penstock.consuming.delivered import Consumed
from penstock.consuming.failures import FailureLog
from penstock.consuming.queue.book import JobBook, Running
from penstock.consuming.queue.deliverer import Ended, JobDeliverer, Surroundings, Troubles
from penstock.consuming.queue.lanes import Lane, Lanes, Work, make_lanes
from penstock.consuming.queue.letters import JobLetters
from penstock.consuming.queue.settler import Settler
from penstock.consuming.queue.transaction import JobTransaction
from penstock.consuming.queue.upkeep import Upkeep
from penstock.consuming.worker import LONGEST_BACKOFF_S, Worker, WorkerOptions
from penstock.database.connections import Connection, Database
from penstock.declaring.declarations import ConsumerSpec, Queue, WorkerSpec
from penstock.declaring.outcomes import Job
from penstock.errors import (
    DeclarationError,
    HandlerExited,
    HandlerHung,
    PenstockError,
    ServerReplaced,
    ServerUnavailable,
)
from penstock.pipeline import Pipeline
from penstock.records import Shard, ShardName

CANCELLING_S = 1.0
"""How long a task may take to end at its time limit, in seconds, before it counts as one that hangs."""


class HungLanes:
    """Those of one worker."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._lanes: list[Lane] = []

    @property
    def limit_s(self) -> float:
        """After so many seconds a handler hangs."""
        return self._spec.limit_s + (CANCELLING_S if self._spec.is_async else 0.0)

    def abandon(self, running: Running) -> None:
        """Nobody waits for this lane any more; its handler has no effect."""
        log.error("handler hangs", consumer=self._spec.name, job=running.lease.message.id, limit_s=self._spec.limit_s)
        running.lane.is_abandoned = True
        running.lease.held.is_stale = True
        self._lanes.append(running.lane)

    def check(self) -> None:
        """Forgets lanes that have ended after all.

        Raises:
            HandlerHung: More of them hang than the worker has lanes.
        """
        self._lanes = [lane for lane in self._lanes if not lane.has_ended]
        if len(self._lanes) > self._spec.concurrency:
            raise HandlerHung(
                f"consumer {self._spec.name}: {len(self._lanes)} handlers have hung for longer than limit_s "
                f"({self._spec.limit_s:g} s), and Python cannot end them: the process has to be started anew. Give what the handler "
                "waits for a timeout"
            )


log = structlog.get_logger("penstock.consumer")

GRACE_S = 5.0
"""How long jobs that have begun may take to end when the worker stops, in seconds."""

PREFETCH_S = 0.02
"""Work for so many seconds is read ahead for the lanes: short jobs come in batches, a long one waits for its lane."""

MAX_ROOM = 100
"""Most jobs that are read at once."""

DRAIN_BLOCK_MS = 10
SLICE_BLOCK_MS = 2

SETTLING_S = 2.0
"""How long a slice waits until the queue has taken how its jobs have ended, in seconds."""

CHECK_S = 1.0
"""Interval, in seconds, at which counts are written and halts are read."""

DEAD_EVERY_S = 5.0
"""Interval, in seconds, at which messages that died in Redis, at their deadline, become dead letters in Postgres."""

NO_LIMIT = 2**31
"""Attempts are counted by the queue and judged here: a dead letter of a pipeline is in Postgres."""


class QueueWorker(Worker[Job[Any]]):
    """Runs the worker of a queue over some or all of its shards."""

    def __init__(
        self,
        pipeline: Pipeline,
        consumer: ConsumerSpec,
        database: Database,
        redis_url: str,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """Sets up; ``open`` connects.

        Raises:
            DeclarationError: The consumer does not read a queue.
        """
        if not isinstance(consumer, WorkerSpec) or not isinstance(consumer.channel, Queue):
            raise DeclarationError(f"consumer {consumer.name} reads no queue; make_worker(…) makes the right worker")
        if (concurrency := options.get("concurrency")) is not None:
            consumer = replace(consumer, concurrency=concurrency)
        super().__init__(pipeline, consumer, database, redis_url, **options)
        self._spec = consumer
        channel = consumer.channel
        assert isinstance(channel, Queue)
        self._shape = QueueShape(
            channel.name,
            streams=channel.streams,
            hand=channel.hand,
            shards=channel.shards,
            namespace=pipeline.scope.namespace,
        )
        self._letters = JobLetters(consumer, pipeline.scope)
        self._failures, self._troubles = FailureLog(consumer.name), Troubles()
        self._book = JobBook(channel.name)
        self._halted: set[Shard] = set()
        self._hung = HungLanes(consumer)
        self._check_at = self._dead_at = self._resume_at = self._backoff = 0.0
        self._reader: Reader | None = None
        self._away: ServerUnavailable | None = None
        self._taken, self._may_have_more = 0, True

    @override
    def open(self) -> None:
        super().open()
        uncounted = self._book.uncounted()  # since before a server went away
        self._book = JobBook(self._shape.name)
        self._book.count_again(uncounted)
        self._hung = HungLanes(self._spec)
        self._check_at = self._resume_at = 0.0
        self._reader = Reader(
            self._client,
            self._shape,
            worker=worker_name(self.consumer.name),
            lease_s=self._spec.lease_s,
            limit_s=self._spec.limit_s,
            attempts=NO_LIMIT,
            on_error=self._leave_out_number,
        )
        assert self._transaction is not None
        self._upkeep = Upkeep(self._transaction, self._client, self._shape, self._shards, self._letters, self._book)
        self._leave_out_shards()
        book = self._book
        self._settler = Settler(self._reader, book.settled, book.fail)
        self._lanes: Lanes = make_lanes(
            Work(self._spec, self._make_deliverer, self._deliver_in, book.fail, lambda: book.is_stopping)
        )
        for _ in range(self._spec.concurrency):
            self._lanes.start()

    @override
    def _registered(self, connection: Connection) -> None:
        checkpoints = Checkpoints(self.consumer, self._pipeline.scope)
        self._note_halted(set(checkpoints.all(connection)))

    def _make_deliverer(self, surroundings: Surroundings) -> JobDeliverer:
        transaction = JobTransaction(
            self._pipeline,
            self._spec,
            self._database_url,
            prepare=self._prepare,
            in_task=self._spec.is_async,
            server_start_us=self._server_start_us,
            timeouts=self._timeouts,
        )
        return JobDeliverer(self._spec, self._pipeline.scope, transaction, surroundings, self._troubles, self._failures)

    def _deliver_in(self, lane: Lane, lease: Lease) -> None:
        """Delivers a job in a lane."""
        if not self._book.begin(lane, lease):
            return
        if lease.message.shard in self._halted:  # since it was read
            self._end(_released(lease))
            return
        try:
            ended = lane.deliverer.deliver(lease)
        except ServerReplaced as error:  # the worker's own thread compares its history
            self._book.fail(error)
            ended = _released(lease)
        except ServerUnavailable as error:
            self._book.note_unavailable(error)
            ended = _released(lease)
        except HandlerExited as error:
            # It counts as an attempt: a job that ends each process must not do so for ever.
            self._book.fail(error)
            ended = self._failed(lease)
        except BaseException as error:  # noqa: BLE001  raised again by the worker's own thread
            self._book.fail(error)
            ended = _released(lease)
        if ended.halted is not None:
            self._halted.add(Shard(lease.message.shard))
        self._end(ended)

    def _end(self, ended: Ended) -> None:
        if self._book.end(ended.lease):
            self._settler.put(ended)

    def _failed(self, lease: Lease) -> Ended:
        delay_s = pause_s(lease.message.attempts, self._spec.backoff_s)
        return Ended(lease, "retried", lease.held.settlement("retry", delay_s=delay_s))

    @override
    def round(self, block_ms: int | None = None) -> Consumed:
        """Reads jobs for the lanes that are free, or waits, ``block_ms`` at the longest; gives what has ended meanwhile.

        Raises:
            ServerUnavailable: A server does not answer when the worker opens; later it waits by itself.
            HandlerExited: The handler wants the process to end.
            HandlerHung: More handlers hang than may run at the same time.
        """
        self._opened_reader()
        if self._book.error is not None:
            raise self._book.error
        self._replace_hung()
        self._keep_books()
        block_s = (self._block_ms if block_ms is None else block_ms) / 1000
        resting = self._rest_s()
        if resting > 0 or self._stop() or (room := self._room()) <= 0:
            self._book.wait(min(block_s, resting) if resting > 0 else block_s)
        else:
            self._read(room, block_s)
        consumed = self._book.collect()
        if not consumed.idle:
            self._backoff = 0.0
        for shard in consumed.halted:
            self._leave_out_shards()
            # Not the reason: it may hold what the handler said of a payload.
            log.error("shard halted, see penstock status", consumer=self.consumer.name, shard=str(shard))
        return consumed

    @override
    def _slice(self) -> Consumed:
        """Reads, and waits until all that was read has ended; gives back what was not begun when time is up."""
        self._taken, self._book.is_stopping, self._away = 0, False, None
        self._may_have_more, consumed, since = True, Consumed(), 0.0
        while not self._book.is_idle or (self._may_have_more and self._taken < self._most):
            if self._stop():
                self._may_have_more = False
                for lease in self._book.stop():
                    self._end(_released(lease))
            consumed.merge(self.round(block_ms=SLICE_BLOCK_MS if self._taken else 0))
            since = (since or monotonic()) if self._book.is_settling else 0.0
            if since and monotonic() - since > SETTLING_S:
                what = f"settling jobs of {self.consumer.name}"
                raise ServerUnavailable(f"{what}: Redis does not answer")
        consumed.merge(self._book.collect())
        if consumed.idle and self._away is not None:
            raise self._away
        return consumed

    def _opened_reader(self) -> Reader:
        if self._reader is None:
            self.open()
        assert self._reader is not None
        return self._reader

    def _room(self) -> int:
        """How many jobs to read; 0 if the lanes have enough."""
        lanes, size = self._spec.concurrency, self._book.size
        ahead = 0
        if self._book.job_s is not None:
            ahead = min(MAX_ROOM, int(PREFETCH_S * lanes / max(self._book.job_s, 1e-5)))
        if size >= lanes + ahead // 2:
            return 0
        return min(MAX_ROOM, lanes + ahead - size, int(min(MAX_ROOM, self._most - self._taken)))

    def _read(self, room: int, block_s: float) -> None:
        try:
            leases = self._opened_reader().read(room, block_s=block_s)
        except ServerUnavailable as error:
            self._rest_after(error)
            return
        self._taken += len(leases)
        self._may_have_more = bool(leases)
        self._book.take(leases)
        for lease in leases:
            self._lanes.put(lease)
        if self._book.is_idle:
            self._backoff = 0.0

    def _rest_s(self) -> float:
        """How long to read nothing, in seconds: after a server did not answer."""
        if (error := self._book.take_unavailable()) is not None and monotonic() >= self._resume_at:
            self._rest_after(error)
        return self._resume_at - monotonic()

    def _rest_after(self, error: ServerUnavailable) -> None:
        self._away, self._may_have_more = error, False
        self._backoff = min(LONGEST_BACKOFF_S, max(0.1, self._backoff * 2))
        self._resume_at = monotonic() + self._backoff
        self._warn_waiting(error, self._backoff)

    def _replace_hung(self) -> None:
        """Replaces lanes whose handlers take longer than they may; other workers get their jobs."""
        for running in self._book.overdue(self._hung.limit_s):
            self._hung.abandon(running)
            self._end(self._failed(running.lease))
            self._lanes.start()
        self._hung.check()

    def _keep_books(self) -> None:
        """Writes counts and reads halts, now and then.  Without Postgres it tries again later, and reading goes on.

        Raises:
            ServerReplaced: ``run`` opens the worker again, and compares.
        """
        if monotonic() < self._check_at:
            return
        self._check_at = monotonic() + CHECK_S
        assert self._transaction is not None
        try:
            self._upkeep.write_counts()
            checkpoints = Checkpoints(self.consumer, self._pipeline.scope)
            self._note_halted(set(self._transaction.read(checkpoints.all)))
            self._note_usable()
            if monotonic() >= self._dead_at:
                self._dead_at = monotonic() + DEAD_EVERY_S
                self._upkeep.bury_dead(self._usable())
        except ServerReplaced:
            raise
        except ServerUnavailable as error:
            self._away = error
            self._warn_waiting(error, CHECK_S)

    def _note_halted(self, going: set[ShardName]) -> None:
        every = self.consumer.channel.shard_names
        self._halted = {each.shard for each in every if each not in going}
        self._leave_out_shards()

    def _leave_out_number(self, number: int, error: PenstockError) -> None:
        """Reports a shard that the reader leaves out for a while."""
        name = ShardName(self._shape.name, Shard(number))
        self._leave_out(name, error)

    def _usable(self) -> list[ShardName]:
        """This worker's shards without those that are left out."""
        return [name for name in self._shards if name not in self._unusable]

    def _note_usable(self) -> None:
        """Takes back what was said of shards that have been read since."""
        for name in [*self._unusable]:
            if self._opened_reader().can_read(name.shard):
                del self._unusable[name]
                self._note_waiting(name, None)
                log.info("shard usable again", consumer=self.consumer.name, shard=str(name))

    def _leave_out_shards(self) -> None:
        """Reads only this worker's shards, and none that is halted."""
        ours = {each.shard for each in self._shards} - self._halted
        if self._reader is not None:
            every = range(len(self._shape.shards))
            self._reader.leave_out([number for number in every if number not in ours])

    @override
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        """Rounds until the queue is empty; gives the number of jobs applied.

        Jobs of halted shards, and those that are due later, stay.

        Raises:
            ForeignQueue: A key of a shard holds something else; all other shards are drained.
            PenstockError: Any other that ``round`` raises.
        """
        applied = 0
        while True:
            consumed = self.round(block_ms=DRAIN_BLOCK_MS)
            applied += consumed.applied
            report(consumed)
            if consumed.idle and self._book.is_idle and self._is_drained():
                self._upkeep.write_counts()
                self._raise_unusable()
                return applied

    def _is_drained(self) -> bool:
        """Whether nothing waits, is leased, or is to come back after a failure."""
        if self._book.is_retrying():
            return False
        for name in self._usable():
            if name.shard not in self._halted:
                with isolated(name, self._leave_out):
                    shard = self._shape.shards[name.shard]
                    stats = run_steps(self._client, shard.stats(), f"inspecting queue {name}")
                    if stats["waiting"] or stats["leased"]:
                        return False
        return True

    @override
    def close(self) -> None:
        """Gives back what was not begun, lets what runs end for ``GRACE_S``, gives back the rest, and closes the connections."""
        reader, self._reader = self._reader, None
        if reader is not None:
            for lease in self._book.stop():
                self._end(_released(lease))
            self._lanes.close(self._spec.concurrency, GRACE_S)
            self._settler.close()
            with suppress(PenstockError):  # they are counts, and leases that end by themselves
                self._upkeep.write_counts()
            with suppress(PenstockError):
                reader.close()
        super().close()


def _released(lease: Lease) -> Ended:
    return Ended(lease, "put_back", lease.held.settlement("release"))
