"""Work stealing: 200 requests a second, half of which stage a record, do all of the pipeline's work."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from time import monotonic, sleep

from benchmarks.application import BULK
from benchmarks.backlogs import NOTHING, Scale
from benchmarks.cases.latency import time_records
from benchmarks.measuring import Case, Figures
from benchmarks.producing import ProducerLoad
from benchmarks.servers import BenchServers
from benchmarks.watching import LATE_S
from benchmarks.watching.arrivals import FILE, read_notes
from benchmarks.watching.processes import Started, start_process

REQUESTS_S = 200

RATE = 0.02
"""Of streaming, and of the consumer."""

STAGING = 0.5
"""The share of requests that stage a record."""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """How long records take, and how many requests it takes."""
    load = ProducerLoad(int(REQUESTS_S * STAGING), 1, seconds=3 * scale.seconds)
    what = f"by the recruits of {REQUESTS_S} requests/s, each chore at a rate of {RATE:.0%}, {load.rate} records/s"
    return [
        Case(
            f"stealing-{REQUESTS_S}",
            "ms",
            f"from a producer's BEGIN to the consumer's COMMIT, {what} (p50, p99)",
            lambda: _measure(servers, load)[0],
            better="less",
            slow=True,
            rounds=scale.few_rounds,
        ),
        Case(
            f"stealing-{REQUESTS_S}-share",
            "% of requests",
            f"requests that were recruited, and that did work, {what}",
            lambda: _measure(servers, load)[1],
            better="less",
            slow=True,
            rounds=scale.few_rounds,
        ),
    ]


def _measure(servers: BenchServers, load: ProducerLoad) -> tuple[Figures, Figures]:
    database_url = servers.stage(NOTHING)
    with _requests(database_url, servers.redis_url) as (process, path):

        def arrivals(expected: int) -> Mapping[int, float]:
            deadline = monotonic() + LATE_S
            while len(found := read_notes(path)) < expected and monotonic() < deadline:
                sleep(0.1)
            return found

        took = time_records(database_url, load, arrivals)
        process.pipe.send("count")
        requests, recruited, worked = process.pipe.recv()
    return took, {"": 100 * recruited / requests, "-worked": 100 * worked / requests}


@contextmanager
def _requests(database_url: str, redis_url: str) -> Iterator[tuple[Started, Path]]:
    """A process that has as many requests, and does nothing else for them."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        path = Path(directory, "arrivals")
        os.environ[FILE] = str(path)  # the process inherits it
        with start_process(_serve, database_url, redis_url) as process:
            yield process, path


def _serve(pipe: Pipe, database_url: str, redis_url: str) -> None:
    from benchmarks.watching.noting import four  # noqa: PLC0415  it notes commits in this process
    from penstock.engines.stealing import Chores, Recruiter  # noqa: PLC0415  in the child alone

    recruiter = Recruiter()
    chores = Chores(four, database_url, redis_url)
    every = chores.all([BULK])
    total = RATE * sum(chore.weight for chore in every) / max(chore.weight for chore in every)
    chores.install(recruiter, rate=total, consumers=[BULK])
    pipe.send("ready")
    due, requests = monotonic(), 0
    try:
        while True:
            recruiter.enlist()
            requests += 1
            due += 1 / REQUESTS_S
            if pipe.poll(max(0.0, due - monotonic())):
                pipe.recv()
                counters = recruiter.counters().values()
                recruited = sum(each.recruited for each in counters)
                pipe.send((requests, recruited, sum(each.finished for each in counters)))
    except (EOFError, OSError):
        return
