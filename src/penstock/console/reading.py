"""Reads for the pages: a server that does not answer is asked once for all of them.

It is not asked again for a few seconds.  The status is one for all viewers, and so are the doctor's
results.  Every other page takes one of a few connections.  Redis is asked whether it answers before
a page takes one: while it is silent, no page that waits for it keeps Postgres from the others.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from penstock.channels.commands import RedisClient
from penstock.channels.server import connect_redis, redis_errors
from penstock.console.access import Right, Visitor
from penstock.console.history import PERIODS, Moment, ask_prometheus
from penstock.console.status_sampler import TIMEOUTS, WAIT_S, Sample, StatusSampler
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.errors import AppendRefused, ServerUnavailable
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.status.snapshot import ConsumerShard, ConsumerStatus, Status
from penstock.operating.worker_sessions import Processes, list_sessions, read_processes
from penstock.pipeline import Pipeline, get_scope
from penstock.records import Scope

T = TypeVar("T")

HIDDEN = "(not for this visitor)"

CONNECTIONS = 4
"""Connections to Postgres of all pages together, beside the one that reads the status."""

REMEMBERED_S = 5.0
"""Seconds for which a failure of Postgres is remembered, and what takes a while to read."""


@dataclass
class ConnectionPool:
    """A few connections to Postgres at a time.

    A page that finds none free waits, unless Postgres has just not answered another one.
    """

    url: str
    _open: int = 0
    _failure: ServerUnavailable | None = None
    _failed_at: float = 0.0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yields a connection for one page, and closes it: it survives no restart of Postgres.

        Raises ``ServerUnavailable``.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._has_failed() or self._open < CONNECTIONS, WAIT_S
            ):
                raise ServerUnavailable(
                    f"Postgres does not answer in time: other pages have all {CONNECTIONS} "
                    "connections of the console"
                )
            if self._failure is not None and self._has_failed():
                raise self._failure.with_traceback(None)
            self._open += 1
        try:
            with self._connect() as opened:
                yield opened
        finally:
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _connect(self) -> Connection:
        try:
            return connect_postgres(self.url, application="console", timeouts=TIMEOUTS)
        except ServerUnavailable as error:
            with self._changed:
                self._failure, self._failed_at = error, monotonic()
            raise

    def _has_failed(self) -> bool:
        return self._failure is not None and monotonic() - self._failed_at < REMEMBERED_S


@dataclass
class _SharedReading(Generic[T]):
    """A reading, or one that is under way."""

    result: Future[T] = field(default_factory=Future)
    started_at: float = field(default_factory=monotonic)
    ended_at: float | None = None


class Shared(Generic[T]):
    """A result that is read for all pages at once; it, or its error, holds ``REMEMBERED_S``."""

    def __init__(self, read: Callable[[], T], late: str) -> None:
        """Sets up; ``late`` is the error of pages that have waited ``WAIT_S``."""
        self._read, self._late, self._lock = read, late, threading.Lock()
        # the last one, and the one before it, which may have a result
        self._attempts: list[_SharedReading[T]] = []

    def get(self) -> T:
        """Returns the result, or raises its error.

        While another one is read, that before is shown.  Without any, pages wait for it, together
        no longer than ``WAIT_S``.
        """
        with self._lock:
            last = self._attempts[-1] if self._attempts else None
            is_due = last is None or (
                last.ended_at is not None and monotonic() - last.ended_at > REMEMBERED_S
            )
            if last is None or is_due:
                last = _SharedReading()
                self._attempts = [*self._attempts[-1:], last]
            previous = self._attempts[0]
        if is_due:
            self._make(last)
        elif last.ended_at is None and previous is not last and previous.result.exception() is None:
            last = previous
        try:
            return last.result.result(max(0.0, last.started_at + WAIT_S - monotonic()))
        except TimeoutError:
            raise ServerUnavailable(self._late) from None

    def _make(self, attempt: _SharedReading[T]) -> None:
        try:
            attempt.result.set_result(self._read())
        except Exception as error:  # noqa: BLE001  it is raised for each page that has asked
            attempt.result.set_exception(error)
        finally:
            attempt.ended_at = monotonic()


class _AwayRedis:
    """Stands for a Redis that did not answer: raises its error again."""

    connection_kwargs: Mapping[str, Any] = {}
    connection_pool = None

    def __init__(self, error: ServerUnavailable) -> None:
        self._error, self.noted_at = error, monotonic()

    def __getattr__(self, _: str) -> Any:
        raise self._error.with_traceback(None)


class Reading:
    """Connections and results that pages share."""

    def __init__(
        self,
        pipeline: Pipeline | None,
        database_url: str,
        redis_url: str,
        sampler: StatusSampler,
        prometheus_url: str | None = None,
    ) -> None:
        """Sets up; the first page connects."""
        self.pipeline, self.sampler = pipeline, sampler
        self._pool, self._redis_url = ConnectionPool(database_url), redis_url
        self.doctor = Shared(
            self._diagnose, "the doctor is still examining the servers: one of them does not answer"
        )
        self.workers = Shared(self._read_workers, "the list of processes does not come in time")
        self.charts: Mapping[str, Shared[list[Moment]]] = {}
        if prometheus_url is not None:
            ask = partial(ask_prometheus, prometheus_url, self.scope.schema)
            late = "Prometheus does not answer in time"
            self.charts = {period: Shared(partial(ask, period), late) for period in PERIODS}
        self._concealed: tuple[Sample, Status] | None = None
        self._away: _AwayRedis | None = None
        self._thread = threading.local()

    @property
    def scope(self) -> Scope:
        """Returns the pipeline's scope."""
        return get_scope(self.pipeline)

    @contextmanager
    def postgres(self) -> Iterator[Store]:
        """Yields a connection to Postgres for one page, which asks Redis before."""
        with self._pool.connection() as connection:
            self._thread.has_postgres = True
            try:
                yield Store(connection, self.scope)
            finally:
                self._thread.has_postgres = False

    @contextmanager
    def redis(self) -> Iterator[RedisClient]:
        """Yields a client for one page; if Redis is away, one that raises ``ServerUnavailable``."""
        assert not getattr(self._thread, "has_postgres", False), "take Redis before Postgres"
        with ExitStack() as stack:
            client: Any = self._away
            if client is None or monotonic() - client.noted_at >= REMEMBERED_S:
                try:
                    client = stack.enter_context(connect_redis(self._redis_url, timeouts=TIMEOUTS))
                    with suppress(AppendRefused), redis_errors("asking Redis"):
                        client.ping()
                except ServerUnavailable as error:
                    client = self._away = _AwayRedis(error)
            yield client

    def _diagnose(self) -> list[CheckResult]:
        with self.redis() as client, self.postgres() as store:
            return diagnose(store, client, self.pipeline)

    def _read_workers(self) -> Processes:
        leased = () if (status := self.sampler.look().status) is None else status.leased
        with self.postgres() as store:
            sessions = list_sessions(store)
        with self.redis() as client:  # while it waits, other pages have the connection to Postgres
            return read_processes(sessions, client, self.scope.namespace, leased)

    def status(self, visitor: Visitor) -> tuple[Sample, Status]:
        """Returns the last sample, which may be old, and what a visitor may see of its status."""
        sample = self.sampler.look()
        if sample.status is None:
            raise ServerUnavailable(f"{sample.error}")
        if visitor.may("keys"):
            return sample, sample.status
        if self._concealed is None or self._concealed[0] is not sample:
            self._concealed = sample, _conceal(sample.status)
        return self._concealed


def _conceal(status: Status) -> Status:
    """Returns a status without reasons, which may quote records.

    A command that a reason names stays, since another would do harm.
    """

    def conceal_shard(consumer: ConsumerStatus, shard: ConsumerShard) -> ConsumerShard:
        return replace(
            shard,
            halted=None
            if shard.halted is None
            else _conceal_halt(consumer, shard.shard, shard.halted),
            waiting=None if shard.waiting is None else HIDDEN,
        )

    consumers = tuple(
        replace(consumer, shards=tuple(conceal_shard(consumer, shard) for shard in consumer.shards))
        for consumer in status.consumers
    )
    isolated = replace(status.faults.isolated, first=())
    pauses = tuple(replace(pause, reason=HIDDEN) for pause in status.pauses)
    return replace(
        status, consumers=consumers, faults=replace(status.faults, isolated=isolated), pauses=pauses
    )


def _conceal_halt(consumer: ConsumerStatus, shard: int, reason: str) -> str:
    name, place = re.escape(consumer.consumer), re.escape(f"{consumer.channel}/{shard} offset ")
    command = re.search(
        rf"penstock reset (checkpoint {name} --to '{place}\d+' --resume --apply"
        rf"|source {name} [a-z0-9_-]+( --to '{place}\d+' --apply)?)",
        reason,
    )
    return HIDDEN if command is None else f"{HIDDEN}: {command[0]}"


@dataclass(frozen=True, slots=True)
class PageContent:
    """Content of a page."""

    values: Mapping[str, Any]  # for its template
    json: Any  # the same as JSON
    sample: Sample | None = None  # the sample that it shows, which may be old
    # true if a server did not answer: the page asks again until nothing of it is missing
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """A page."""

    template: str
    read: Callable[[Reading, Visitor, Request], PageContent]
    path: str
    menu: str = ""  # its name in the menu; empty if it is not there
    is_live: bool = True  # true if it follows the pipeline while it is open
    right: Right = "see"
