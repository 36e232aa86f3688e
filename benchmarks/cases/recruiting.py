"""What recruiting costs a web process: the latency of its requests, the call itself, and memory.

Requests with and without, or with servers in order and not, are sent in turn, half a second each: both meet the same machine.
"""

import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmarks.backlogs import Backlog, Scale
from benchmarks.measuring import Case, Contestant, Figures, NotMeasured, percentile
from benchmarks.servers import BenchServers
from benchmarks.watching.delaying import delay
from benchmarks.watching.processes import Started, start_process
from benchmarks.watching.web import RATE, serve

REQUESTS_S = 200
BLOCK = REQUESTS_S // 2
"""Requests of one kind after one another; the first tenth of them is not counted."""

WARM_S = 60.0

FRESH = Path(__file__).parents[1] / "fresh"

Target = tuple[Path, str]
"""Socket and path of requests."""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Latency beside chores, and while their servers are away; and what a fresh process pays."""
    seconds, backlog = 2 * scale.seconds, Backlog(scale.records)
    return [
        _make_latency_case(servers, backlog, seconds),
        *(_make_fault_case(servers, backlog, seconds, fault) for fault in FAULTS),
        Case(
            "recruit-call",
            "µs",
            f"a request to an ASGI application that does nothing and recruits at a rate of {RATE:.0%}, in a fresh process",
            lambda: {"": _run_fresh("request.py")[1]},
            {"without recruiting": lambda: {"": _run_fresh("request.py")[0]}},
            better="less",
        ),
        Case(
            "recruit-memory",
            "MB",
            "private memory of a fresh process with FastAPI and SQLAlchemy that recruits; and after its first chore",
            partial(_measure_memory, servers),
            {"without recruiting": _measure_memory_without},
            better="less",
            rounds=scale.few_rounds,
        ),
    ]


def _make_latency_case(servers: BenchServers, backlog: Backlog, seconds: float) -> Case:
    def measure() -> tuple[list[float], list[float]]:
        with servers.copy(backlog) as url, _web(url, servers.redis_url) as (process, web):
            took = _request([(web, "/plain/"), (web, "/recruiting/")], seconds)
            process.pipe.send("count")
            ended, finished = process.pipe.recv()
        if not finished:
            raise NotMeasured(f"none of {ended} chores did any work")
        return took

    without, ours = _side_by_side(measure)
    return Case(
        f"recruit-{REQUESTS_S}",
        "ms",
        f"a request, {REQUESTS_S} a second, to a process that also publishes and consumes a backlog, each chore at a rate of at most {RATE:.0%} (p50, p99)",
        ours,
        {"without recruiting": without},
        better="less",
    )


def _make_fault_case(servers: BenchServers, backlog: Backlog, seconds: float, fault: str) -> Case:
    def measure() -> tuple[list[float], list[float]]:
        with ExitStack() as stack:
            url = stack.enter_context(servers.copy(backlog))
            redis_url = servers.redis_url
            directory = stack.enter_context(FAULTS[fault](url, redis_url))
            _, calm = stack.enter_context(_web(url, redis_url))
            behind = [_behind(each, directory) for each in (url, redis_url)]
            _, faulty = stack.enter_context(_web(*behind))
            return _request([(calm, "/recruiting/"), (faulty, "/recruiting/")], seconds)

    calm, ours = _side_by_side(measure)
    return Case(
        f"recruit-{fault}",
        "ms",
        f"the same while Postgres and Redis are {fault} for the chores (p50, p99)",
        ours,
        {"servers in order": calm},
        better="less",
    )


def _side_by_side(measure: Callable[[], tuple[list[float], list[float]]]) -> tuple[Contestant, Contestant]:
    """A limit and its counterpart, measured together when it is the limit's time."""
    left: list[Figures] = []

    def limit() -> Figures:
        first, second = map(_quantiles, measure())
        left[:] = [second]
        return first

    def ours() -> Figures:
        if not left:
            raise NotMeasured("the requests beside it were not measured")
        return left.pop()

    return limit, ours


def _quantiles(values: list[float]) -> Figures:
    return {"": percentile(values, 0.5), "-p99": percentile(values, 0.99)}


@contextmanager
def _web(database_url: str, redis_url: str) -> Iterator[tuple[Started, Path]]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        path = Path(directory, "web")
        with start_process(serve, str(path), database_url, redis_url) as process:
            _warm_up(process, path)
            yield process, path


def _warm_up(process: Started, path: Path) -> None:
    """Until a chore has ended: the first one loads the drivers, half a second of work that a process has once."""
    deadline, ended = monotonic() + WARM_S, 0
    while not ended:
        if monotonic() > deadline:
            raise NotMeasured(f"no chore has ended within {WARM_S:.0f} s")
        _request([(path, "/recruiting/")], 0.1)
        process.pipe.send("count")
        ended, _ = process.pipe.recv()


class _Connection(HTTPConnection):
    """Over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


def _request(targets: list[Target], seconds: float) -> tuple[list[float], list[float]]:
    """Sends requests to two targets in turn; returns how long those of each took, in ms."""
    took: tuple[list[float], list[float]] = ([], [])
    connections = [_Connection(path) for path, _ in targets]
    due = monotonic()
    for number in range(int(seconds * REQUESTS_S)):
        which = number // BLOCK % len(targets)
        due += 1 / REQUESTS_S
        early = due - monotonic()
        if early > 0:
            sleep(early)
        began = monotonic() if early > 0 else due  # waiting behind a slow request counts
        connections[which].request("GET", targets[which][1])
        response = connections[which].getresponse()
        if not response.read() or response.status != 200:  # noqa: PLR2004
            raise NotMeasured(f"a request was answered by {response.status}")
        if number % BLOCK >= BLOCK // 10:
            took[which].append((monotonic() - began) * 1000)
    for connection in connections:
        connection.close()
    return took


@contextmanager
def _away(*_: str) -> Iterator[Path]:
    """A directory without the servers' sockets."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        yield Path(directory)


@contextmanager
def _silent(*urls: str) -> Iterator[Path]:
    """Servers that accept connections and never answer."""
    with _away() as directory, ExitStack() as stack:
        for upstream in map(_find_socket, urls):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(directory / upstream.name))
            listener.listen(128)
        yield directory


@contextmanager
def _slow(*urls: str) -> Iterator[Path]:
    """Servers behind a proxy that delays all they receive and send."""
    upstreams = [_find_socket(url) for url in urls]
    with _away() as directory, start_process(delay, upstreams, directory):
        yield directory


FAULTS: Mapping[str, Callable[..., Any]] = {"away": _away, "silent": _silent, "slow": _slow}


def _find_socket(url: str) -> Path:
    """The Unix socket that the benchmark's servers listen on."""
    if url.startswith("unix:"):
        return Path(url.removeprefix("unix://").partition("?")[0])
    found = re.search(r"host=([^&]+)&port=(\d+)", url)
    if found is None:
        raise NotMeasured("Postgres has no Unix socket")
    return Path(found[1]) / f".s.PGSQL.{found[2]}"


def _behind(url: str, directory: Path) -> str:
    """The URL with the socket of the same name in another directory."""
    before = _find_socket(url)
    return url.replace(str(before.parent), str(directory))


def _run_fresh(script: str, *arguments: str) -> Any:
    program = [sys.executable, str(FRESH / script), *arguments]
    done = subprocess.run(  # noqa: S603  our own
        program, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotMeasured(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def _measure_memory(servers: BenchServers) -> Figures:
    chore = ("chore", servers.database("recruit-memory"), servers.redis_url)
    return {"": _run_fresh("memory.py", "enlist"), "-chore": _run_fresh("memory.py", *chore)}


def _measure_memory_without() -> Figures:
    alone = _run_fresh("memory.py")
    return {"": alone, "-chore": alone}
