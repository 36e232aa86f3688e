"""A process that is ready before it is waited for, and ends with the pipe to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from typing import Any

from penstock.bench.measuring import NotMeasured

READY_S = 120.0
END_S = 20.0


@dataclass(frozen=True)
class Started:
    """A process at work.

    Attributes:
        pipe: Our end of the pipe to it.
        number: Its id.
    """

    pipe: Pipe
    number: int


@contextmanager
def process(work: Callable[..., None], *arguments: Any) -> Iterator[Started]:
    """A process that does ``work(pipe, *arguments)``, from when it has said that it is ready.

    Raises:
        NotMeasured: It did not get ready.
    """
    spawning = get_context("spawn")
    ours, theirs = spawning.Pipe()
    started = spawning.Process(target=work, args=(theirs, *arguments), daemon=True)
    started.start()
    theirs.close()
    try:
        _await_ready(ours)
        yield Started(ours, started.pid or 0)
    finally:
        ours.close()  # whoever still works is told by the end of the pipe
        started.join(END_S)
        if started.is_alive():
            started.kill()


def _await_ready(pipe: Pipe) -> None:
    try:
        if pipe.poll(READY_S):
            pipe.recv()
            return
    except EOFError:
        raise NotMeasured("a process of the bench has ended at its start") from None
    raise NotMeasured(f"a process of the bench was not ready within {READY_S:.0f} s")
