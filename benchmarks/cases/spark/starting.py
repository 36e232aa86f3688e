"""What it takes to have an engine: seconds until its first record, memory once it runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic, sleep

import psutil  # type: ignore[import-untyped]  # it ships no types

from benchmarks.application import BULK
from benchmarks.backlogs import Backlog, Scale
from benchmarks.cases.consuming import count_applied
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.servers import BenchServers
from benchmarks.watching.engines import APP

FEW = Backlog(100)
"""The records that wait when the engine starts."""

CLUSTER = "local-cluster[1,4,1024]"
"""Spark's own small cluster: executors are processes of their own."""

POLL_EVERY_S = 0.02
READY_S = 120.0
END_S = 20.0
SETTLED_S = 10.0
"""How long an engine has run when its memory is measured."""

MB = 1_000_000


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Start and memory of the engine on Spark, beside the inline one."""
    return [
        *(
            Case(
                name=name,
                unit="s",
                sentence=f"from the start of `penstock run` to its first applied record, {where}",
                ours=partial(_measure_start, servers, "spark", *more),
                limits={"inline engine": partial(_measure_start, servers, "inline")},
                better="less",
                slow=True,
                rounds=scale.few_rounds,
            )
            for name, where, more in (
                ("spark-start", "Spark on this machine", ()),
                ("spark-start-cluster", "Spark with an executor of its own", ("--master", CLUSTER)),
            )
        ),
        Case(
            name="spark-memory",
            unit="MB",
            sentence="memory of `penstock run` with its processes: the streamer and one consumer, Spark on this machine",
            ours=partial(_measure_memory, servers, "spark"),
            limits={"inline engine": partial(_measure_memory, servers, "inline")},
            better="less",
            slow=True,
            rounds=1,
        ),
    ]


def _measure_start(servers: BenchServers, engine: str, *more: str) -> Figures:
    with _run(servers, engine, *more) as (_, seconds):
        return {"": seconds}


def _measure_memory(servers: BenchServers, engine: str) -> Figures:
    """Proportional set sizes: what processes share is counted once."""
    with _run(servers, engine) as (process, _):
        sleep(SETTLED_S)
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        try:
            return {"": sum(each.memory_full_info().pss for each in family) / MB}
        except AttributeError:
            raise NotMeasured("this system has no proportional set size") from None


@contextmanager
def _run(servers: BenchServers, engine: str, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """``penstock run`` with a few records that wait.

    Yields the process, and the seconds until the consumer had applied a record.
    """
    url = servers.stage(FEW)
    command = [sys.executable, "-m", "penstock", "run", "--engine", engine, "--app", APP]
    environment = os.environ | {"PENSTOCK_DATABASE_URL": url, "PENSTOCK_REDIS_URL": servers.redis_url}
    with servers.postgres(url) as connection:
        began = monotonic()
        process = subprocess.Popen(  # noqa: S603  our own
            [*command, "--consumer", BULK, "--log-level", "error", *more],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while not count_applied(connection, BULK):
                if process.poll() is not None or monotonic() > began + READY_S:
                    raise NotMeasured(f"penstock run --engine {engine} did not apply a record")
                sleep(POLL_EVERY_S)
            yield process, monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(END_S)
