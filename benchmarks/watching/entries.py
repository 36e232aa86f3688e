"""A reader of streams: a record arrives when its entry is read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from time import monotonic
from typing import Any

from benchmarks.watching.arrivals import LATE_S, Arrivals
from benchmarks.watching.processes import READY_S, start_process
from penstock.channels.server import connect_redis


@contextmanager
def watch_entries(redis_url: str, streams: Sequence[str]) -> Iterator[Arrivals]:
    """Reads the streams in a process."""
    with start_process(_read, redis_url, list(streams)) as reader:

        def arrivals(expected: int) -> Mapping[int, float]:
            reader.pipe.send(expected)
            return dict(reader.pipe.recv()) if reader.pipe.poll(LATE_S + READY_S) else {}

        yield arrivals


class _Expected:
    """How many records to read: sent through the pipe after the last one was produced."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._count: int | None = None
        self._deadline = 0.0
        self.abandoned = False

    def met(self, arrived: int) -> bool:
        """Whether there is nothing left to wait for."""
        if self._count is None:
            try:
                if self._pipe.poll(0):
                    self._count = self._pipe.recv()
                    self._deadline = monotonic() + LATE_S
            except (EOFError, OSError):
                self.abandoned = True
        if self.abandoned:
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
                    for payload in fields[b"data"].split(b"\n"):  # one, or one of each record
                        arrived[json.loads(payload)["id"]] = now
    if not expected.abandoned:
        pipe.send(arrived)
