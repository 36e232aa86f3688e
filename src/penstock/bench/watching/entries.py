"""A reader of streams: a record arrives when its entry is read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from time import monotonic
from typing import Any

from penstock.bench.watching.arrivals import LATE_S, Arrivals
from penstock.bench.watching.processes import READY_S, process
from penstock.channels.server import connect_redis


@contextmanager
def entries(redis_url: str, streams: Sequence[str]) -> Iterator[Arrivals]:
    """A reader of the streams in a process."""
    with process(_read, redis_url, list(streams)) as reader:

        def arrivals(expected: int) -> Mapping[int, float]:
            reader.pipe.send(expected)
            return dict(reader.pipe.recv()) if reader.pipe.poll(LATE_S + READY_S) else {}

        yield arrivals


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


def _read(pipe: Pipe, redis_url: str, streams: list[str]) -> None:
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
