"""Running a pipeline in the test's own thread until nothing is left to do."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from time import monotonic
from typing import Any

from penstock.consuming import Consumed, SeveralRunners, Worker, make_worker
from penstock.database.connections import connect_postgres
from penstock.database.registry import read_pauses
from penstock.database.store import Store
from penstock.declaring.declarations import ConsumerSpec, WorkerSpec
from penstock.declaring.kinds import Channel, LogChannel
from penstock.declaring.outcomes import Cancel, DeadLetter
from penstock.display import format_count
from penstock.errors import DeclarationError
from penstock.pipeline import Pipeline
from penstock.streaming import Streamer

RETRY_S = 0.02
"""Pause after the first failed attempt at a job of a queue, in seconds."""

MAX_ROUNDS = 100
"""Rounds after which ``drained`` gives up.

Some handler stages a new record for each record that it reads.
"""


def drained(  # noqa: PLR0913  what a run takes
    pipeline: Pipeline,
    database_url: str,
    redis_url: str,
    *,
    consumers: Iterable[str] | None = None,
    allow_dead_letters: bool = False,
    timeout_s: float = 60.0,
    sources: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Publishes staged, committed records and has the consumers process them until none is left.

    Records that handlers stage are processed too.  Everything runs in the calling thread, but for
    the jobs of queues, which have threads or an event loop of their own.  In an ``async def`` test
    with consumers that are ``async def``, give it another thread:
    ``await asyncio.to_thread(drained, …)``.

    Queues are worked on until they are empty: failed jobs are retried soon, jobs that are due later
    stay.

    Args:
        pipeline: The pipeline.
        database_url: Postgres.
        redis_url: Redis or Valkey.
        consumers: Names of the consumers to run; by default all.
        allow_dead_letters: Whether records may be dead-lettered.
        timeout_s: Longest time that a consumer may take, in seconds: a handler may return
            ``Snooze`` for ever.
        sources: For consumers that read several sources: the URL of each source's Postgres, by the
            source's name.  Their streamers are not this pipeline's: drain their own pipelines
            first.

    Returns:
        For each consumer, how many records or members it has applied.

    Raises:
        AssertionError: A shard is halted, a consumer is paused, records were dead-lettered,
            handlers stage without end, or the time is over.  The last exception of a handler is its
            cause.
        DeclarationError: An event loop runs in this thread, and a consumer is ``async def``.
        PenstockError: What the streamer or a worker raises.
    """
    names = list(pipeline.consumers) if consumers is None else list(consumers)
    _refuse_running_loop([pipeline.get_consumer(name) for name in names])
    last = _LastFailure()
    with ExitStack() as stack:
        connection = stack.enter_context(connect_postgres(database_url, application="test"))
        failures = _Failures(Store(connection, pipeline.scope))
        old_letters = failures.dead_letters()
        streamer = Streamer(pipeline, database_url, redis_url)
        stack.callback(streamer.close)
        drains = {}
        for name in names:
            consumer = last.noted(pipeline.get_consumer(name))
            worker = make_worker(pipeline, consumer, database_url, redis_url, sources=sources or {})
            stack.callback(worker.close)
            drains[name] = partial(_drained_in_time, worker, timeout_s, last)
        applied = _drained(streamer, drains)
        problems = failures.stopped([pipeline.get_consumer(name) for name in names])
        if not allow_dead_letters:
            letters = failures.dead_letters().items()
            problems += [letter for place, letter in letters if place not in old_letters]
    if problems:
        raise AssertionError("\n".join(problems)) from last.error
    return applied


def _refuse_running_loop(consumers: Iterable[ConsumerSpec]) -> None:
    """Refuses async consumers in a running event loop, before anything is opened."""
    needing = [consumer.name for consumer in consumers if consumer.is_async]
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if needing:
        raise DeclarationError(
            f"consumer {needing[0]} is async def and is run in an event loop of its own, and the "
            "test runs in one. Drain in another thread: await asyncio.to_thread(penstock_drain), "
            "or await asyncio.to_thread(drained, …)"
        )


def _drained(streamer: Streamer, drains: Mapping[str, Callable[[], int]]) -> dict[str, int]:
    """Streams and consumes until nothing is left; returns what each consumer has applied."""
    applied = dict.fromkeys(drains, 0)
    for _ in range(MAX_ROUNDS):
        streamer.drain()
        counts = {name: drain() for name, drain in drains.items()}
        if not any(counts.values()):
            return applied
        applied = {name: applied[name] + count for name, count in counts.items()}
    raise AssertionError(
        f"not drained after {MAX_ROUNDS} rounds: a handler stages a record for each one that it "
        "reads"
    )


def _drained_in_time(
    worker: Worker | SeveralRunners, timeout_s: float, last: "_LastFailure"
) -> int:
    """Runs a worker until nothing is left, within the time; returns what it has applied."""
    deadline = monotonic() + timeout_s

    def check(_: Consumed) -> None:
        if monotonic() > deadline:
            raise AssertionError(
                f"consumer {worker.consumer.name} was not drained within {timeout_s:g} s"
            ) from last.error

    return worker.drain(check)


def within(
    consumer: ConsumerSpec, context: Callable[[Any], AbstractContextManager[None]]
) -> ConsumerSpec:
    """Returns the consumer with its handler called within a context made from its records."""
    handler: Callable[..., Any] = consumer.handler

    @wraps(handler)
    def called(*arguments: Any) -> object:
        with context(arguments[-1]):
            return handler(*arguments)

    @wraps(handler)
    async def called_async(*arguments: Any) -> object:
        with context(arguments[-1]):
            return await handler(*arguments)

    return replace(consumer, handler=called_async if consumer.is_async else called)


@dataclass
class _LastFailure:
    """The last exception of a handler."""

    error: Exception | None = None

    def noted(self, consumer: ConsumerSpec) -> ConsumerSpec:
        """Returns the consumer with a handler whose exceptions are noted here."""
        watched = within(consumer, self._noting)
        return replace(watched, backoff=RETRY_S) if isinstance(watched, WorkerSpec) else watched

    @contextmanager
    def _noting(self, _records: Any) -> Iterator[None]:
        try:
            yield
        except (Cancel, DeadLetter):
            raise
        except Exception as error:
            self.error = error
            raise


def _names_read(channel: Channel) -> list[str]:
    """Returns the names under which a channel is read: one for each source."""
    if isinstance(channel, LogChannel) and channel.sources:
        return [channel.of_source(source).name for source in channel.sources]
    return [channel.name]


@dataclass(frozen=True, slots=True)
class _Failures:
    """Descriptions of halted shards and dead letters."""

    store: Store

    def stopped(self, consumers: Sequence[ConsumerSpec]) -> list[str]:
        """Describes the pauses of consumers and their channels, and their halted shards."""
        rows = self._rows("halted_shards", consumers=[consumer.name for consumer in consumers])
        read = [
            (consumer.name, name)
            for consumer in consumers
            for name in _names_read(consumer.channel)
        ]
        active = (
            pause for pause in read_pauses(self.store) if any(pause.holds(*pair) for pair in read)
        )
        pauses = [str(pause) for pause in active]
        return pauses + [
            f"consumer {name} is halted in {channel}/{shard}: {why}"
            for name, channel, shard, why in rows
        ]

    def dead_letters(self) -> dict[tuple[str, str, int, int], str]:
        """Describes the dead letters, by consumer, channel, shard and offset."""
        rows = self._rows("dead_letters_written")
        return {
            (consumer, channel, shard, offset): (
                f"consumer {consumer} dead-lettered {channel}/{shard}/{offset}, key {key!r}, "
                f"{action} {object_name}, after {format_count(attempts, 'attempt')}: {reason}"
            )
            for consumer, channel, shard, offset, key, action, object_name, attempts, reason in rows
        }

    def _rows(self, name: str, **values: object) -> list[tuple[Any, ...]]:
        return self.store.rows(name, values, doing="looking for failed records")
