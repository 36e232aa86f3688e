"""Who notes when a record arrives: processes of their own, on the machine's one monotonic clock."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from time import monotonic
from typing import Any

import structlog

from penstock.bench.application import pipeline_of
from penstock.channels.server import connect_redis
from penstock.pipeline import Pipeline

READY_S = 60.0
LATE_S = 30.0

Arrivals = Callable[[int], Mapping[int, float]]
"""Given how many were sent, waits for them, ends the process, and gives when each arrived."""


@contextmanager
def effects(
    database_url: str, redis_url: str, pipeline: Pipeline, consumers: Sequence[str]
) -> Iterator[Arrivals]:
    """The inline engine in a process; a record arrives when the transaction of its effect is committed."""
    shards = sum(channel.shards for channel in pipeline.channels.values())
    with _process(_engine, database_url, redis_url, shards, list(consumers)) as arrivals:
        yield arrivals


@contextmanager
def entries(redis_url: str, streams: Sequence[str]) -> Iterator[Arrivals]:
    """A reader of the streams in a process; a record arrives when its entry is read."""
    with _process(_reader, redis_url, list(streams)) as arrivals:
        yield arrivals


@contextmanager
def _process(work: Callable[..., None], *arguments: Any) -> Iterator[Arrivals]:
    spawning = get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    found: dict[int, float] = {}

    def arrivals(expected: int) -> Mapping[int, float]:
        ours.send(expected)
        if ours.poll(LATE_S + READY_S):
            found.update(ours.recv())
        return found

    try:
        if not ours.poll(READY_S):
            raise TimeoutError("a process of the bench did not start")
        ours.recv()
        yield arrivals
    finally:
        ours.close()  # whoever still works is told by the end of the pipe
        process.join(10)
        if process.is_alive():
            process.kill()


class _Expected:
    """How many records are to come: told through the pipe when all have been sent."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._count: int | None = None
        self._deadline = 0.0
        self.gone = False

    def met(self, arrived: int) -> bool:
        """Whether nothing more is to be waited for."""
        if self._count is None:
            try:
                if self._pipe.poll(0):
                    self._count = self._pipe.recv()
                    self._deadline = monotonic() + LATE_S
            except (EOFError, OSError):
                self.gone = True
        if self.gone:
            return True
        return self._count is not None and (arrived >= self._count or monotonic() > self._deadline)


def _engine(
    pipe: Pipe, database_url: str, redis_url: str, shards: int, consumers: list[str]
) -> None:
    from penstock.engines import inline  # noqa: PLC0415  in the child alone
    from penstock.telemetry import install_crashpoint  # noqa: PLC0415  the same

    # Its log would go to stdout, which is for data.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    pipeline, expected = pipeline_of(shards), _Expected(pipe)
    waiting: list[int] = []
    arrived: dict[int, float] = {}
    looked_at = 0.0

    def noting(handler: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
        def handle(session: Any, records: Any) -> None:
            waiting[:] = [record.data["id"] for record in records]
            handler(session, records)

        return handle

    def passed(point: str) -> None:
        if point == "consumer.after_commit":
            arrived.update(dict.fromkeys(waiting, monotonic()))
            waiting.clear()

    def stop() -> bool:
        nonlocal looked_at
        if (now := monotonic()) - looked_at < 0.1:  # noqa: PLR2004  a system call less a round
            return expected.gone
        looked_at = now
        return expected.met(len(arrived)) if consumers else expected.met(0) and expected.gone

    for name in consumers:
        spec = pipeline.consumer_named(name)
        object.__setattr__(spec, "handler", noting(spec.handler))
    install_crashpoint(passed)
    pipe.send("ready")
    inline.run(pipeline, database_url, redis_url, consumers=consumers, stop=stop)
    if not expected.gone:
        pipe.send(arrived)


def _reader(pipe: Pipe, redis_url: str, streams: list[str]) -> None:
    expected = _Expected(pipe)
    after: dict[Any, Any] = dict.fromkeys((stream.encode() for stream in streams), b"0")
    arrived: dict[int, float] = {}
    pipe.send("ready")
    with connect_redis(redis_url) as client:
        while not expected.met(len(arrived)):
            answer = client.xread(after, count=1000, block=100)
            now = monotonic()
            pairs = answer.items() if isinstance(answer, dict) else answer
            for stream, found in pairs:
                flat = found[0] if found and isinstance(found[0], list) else found
                for entry_id, fields in flat:
                    after[stream] = entry_id
                    arrived[json.loads(fields[b"data"])["id"]] = now
    if not expected.gone:
        pipe.send(arrived)
