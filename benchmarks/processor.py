"""Processor time of a worker and of the servers that work for it: what a record costs, on a machine that is shared, too.

It is read before and after the work.  Peers run this file as a script: see ``Meter`` in ``peers/harness.py``.
"""

import json
import sys
import time
from collections.abc import Callable

import psutil  # type: ignore[import-untyped]  # it ships no types

Costs = dict[str, float]
"""Seconds of ``worker``, ``postgres`` and ``redis``."""


def read_processor_s(process: int) -> float:
    """Processor time of a process, to the microsecond: Linux derives the number of its clock from its process id."""
    return time.clock_gettime((~process << 3) | 2)


def read_costs(worker: int, backend: int, redis: int) -> Costs:
    """What they have used so far: two processes, and the whole server of a Postgres backend."""
    return {
        "worker": read_processor_s(worker),
        "postgres": _read_server_s(psutil.Process(backend).parent()),
        "redis": read_processor_s(redis),
    }


def measure_costs(work: Callable[[], object], worker: int, backend: int, redis: int) -> Costs:
    """What they use while this runs."""
    before = read_costs(worker, backend, redis)
    work()
    after = read_costs(worker, backend, redis)
    return {who: after[who] - before[who] for who in before}


def _read_server_s(postmaster: psutil.Process) -> float:
    """Every process of the server: one that has ended is counted by its parent from then on."""
    children: list[int] | None = None
    used = 0.0
    while children != (now := sorted(each.pid for each in postmaster.children())):
        children = now
        ended = postmaster.cpu_times()
        used = sum(map(_read_or_zero, [postmaster.pid, *children]))
        used += ended.children_user + ended.children_system
    return used


def _read_or_zero(process: int) -> float:
    try:
        return read_processor_s(process)
    except OSError:  # it has ended
        return 0.0


if __name__ == "__main__":
    print(json.dumps(read_costs(*map(int, sys.argv[1:]))))  # noqa: T201  its result
