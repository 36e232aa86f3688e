"""When records arrived: what a reader has seen, or what was noted in a file by whoever committed."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from time import monotonic

LATE_S = 30.0
"""How long the last records are waited for."""

FILE = "PENSTOCK_BENCH_ARRIVALS"
"""Variable of the environment that names the file: it reaches Spark's tasks too."""

Arrivals = Callable[[int], Mapping[int, float]]
"""Given how many were sent, waits for them, and gives when each arrived: fewer, if they come too late."""


def note(numbers: Iterable[int]) -> None:
    """Notes that these records have arrived now: a line, written at once, whoever else writes."""
    os.write(_file(), f"{monotonic()!r} {' '.join(map(str, numbers))}\n".encode())


@cache
def _file() -> int:
    return os.open(os.environ[FILE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def noted(path: Path) -> dict[int, float]:
    """When each record arrived, as far as it was noted."""
    arrived: dict[int, float] = {}
    if path.exists():
        for line in path.read_text(encoding="ascii").split("\n")[:-1]:
            at, *numbers = line.split()
            arrived.update(dict.fromkeys(map(int, numbers), float(at)))
    return arrived
