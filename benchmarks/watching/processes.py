"""A process that is used once it is ready, and that ends when its pipe is closed."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from typing import Any

from benchmarks.measuring import NotMeasured

READY_S = 120.0
END_S = 20.0


@dataclass(frozen=True)
class Started:
    """A process that is ready.

    Attributes:
        pipe: Our end of the pipe to it.
        number: Its process id.
    """

    pipe: Pipe
    number: int


@contextmanager
def start_process(work: Callable[..., None], *arguments: Any) -> Iterator[Started]:
    """Runs ``work(pipe, *arguments)`` in a process; the block begins when it has sent that it is ready.

    Raises:
        NotMeasured: It did not become ready.
    """
    spawning = get_context("spawn")
    ours, theirs = spawning.Pipe()
    started = spawning.Process(target=_run, args=(work, theirs, *arguments), daemon=True)
    started.start()
    theirs.close()
    try:
        _await_ready(ours)
        yield Started(ours, started.pid or 0)
    finally:
        ours.close()  # the process ends when it reads the end of the pipe
        started.join(END_S)
        if started.is_alive():
            started.kill()


def _run(work: Callable[..., None], pipe: Pipe, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to us too: the pipe ends us
    work(pipe, *arguments)


def _await_ready(pipe: Pipe) -> None:
    try:
        if pipe.poll(READY_S):
            pipe.recv()
            return
    except EOFError:
        raise NotMeasured("a process of the benchmark ended while it was starting") from None
    raise NotMeasured(f"a process of the benchmark was not ready within {READY_S:.0f} s")
