"""When records arrived: seen by a reader, or noted in a file by the process that committed their effects."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from time import monotonic

LATE_S = 30.0
"""How long to wait for the last records."""

FILE = "PENSTOCK_BENCH_ARRIVALS"
"""Environment variable with the path of the file; Spark's tasks inherit it too."""

Arrivals = Callable[[int], Mapping[int, float]]
"""Takes the number of records sent, waits for them, and returns when each arrived; late ones are missing."""


def note(numbers: Iterable[int]) -> None:
    """Notes that these records have arrived now: one line, in one write, since several processes append."""
    os.write(_file(), f"{monotonic()!r} {' '.join(map(str, numbers))}\n".encode())


@cache
def _file() -> int:
    return os.open(os.environ[FILE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def read_notes(path: Path) -> dict[int, float]:
    """When each noted record arrived."""
    arrived: dict[int, float] = {}
    if path.exists():
        for line in path.read_text(encoding="ascii").split("\n")[:-1]:
            at, *numbers = line.split()
            arrived.update(dict.fromkeys(map(int, numbers), float(at)))
    return arrived
