"""An engine in a process of its own: inline, or on Spark."""

import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

import structlog

from benchmarks.application import Form
from benchmarks.connections import connect
from benchmarks.measuring import NotMeasured
from benchmarks.watching.arrivals import FILE, LATE_S, Arrivals, read_notes
from benchmarks.watching.processes import READY_S, start_process
from penstock.errors import JavaMissing
from penstock.pipeline import load_pipeline
from penstock.testing import eventually

EngineName = Literal["inline", "spark"]

APP = "benchmarks.application:four"
NOTING = "benchmarks.watching.noting:four"

POLL_EVERY_S = 0.2


Twin = Form | Literal["observed"]


def name_app(app: str, form: Twin) -> str:
    """The twin of a pipeline for a log of this form, or with metrics, as ``--app`` takes it."""
    return app if form == "packed" else f"{app}_{form}"


@contextmanager
def run_engine(  # noqa: PLR0913  the options of an engine
    engine: EngineName,
    database_url: str,
    redis_url: str,
    *,
    streamer: bool = True,
    consumers: Sequence[str] = (),
    app: str = APP,
    cores: int | None = None,
) -> Iterator[int]:
    """Runs the engine in a process; the block begins when its streamer and its consumers have connected.

    The engine, with every process that it starts, is bound to ``cores`` cores; None binds it to none.  Yields its
    process id.

    Raises:
        NotMeasured: Spark or Java is not installed, there are fewer cores, or the workers did not connect.
    """
    bound = None if cores is None else _choose_cores(cores)
    names = ["penstock streamer"] if streamer else []
    names += [f"penstock consumer {consumer}" for consumer in consumers]
    if engine == "spark":
        _check_spark()
    with (
        tempfile.NamedTemporaryFile(prefix="penstock-bench-", mode="r") as output,
        start_process(
            *(_work, output.name, engine, app, database_url, redis_url, streamer, list(consumers)), bound
        ) as engine_process,
        connect(database_url) as connection,
    ):

        def connected() -> bool:
            row = connection.execute(
                "SELECT count(DISTINCT application_name) FROM pg_stat_activity "
                "WHERE datname = current_database() AND split_part(application_name, '/', 1) = ANY(%s)",
                [names],
            ).fetchone()
            return row == (len(names),)

        try:
            eventually(connected, f"{', '.join(names)} have connected", timeout_s=READY_S)
        except AssertionError as error:
            raise NotMeasured(f"the engine {engine}: {error}; its output: {output.read()[-2000:]}") from None
        yield engine_process.number


@contextmanager
def watch_effects(
    engine: EngineName, database_url: str, redis_url: str, consumers: Sequence[str], *, app: str = NOTING
) -> Iterator[Arrivals]:
    """Runs the streamer and the consumers; a record arrives when the transaction of its effect is committed.

    Raises:
        NotMeasured: As ``run_engine``.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        path = Path(directory, "arrivals")
        os.environ[FILE] = str(path)  # the process inherits it
        with run_engine(engine, database_url, redis_url, consumers=consumers, app=app):

            def arrivals(expected: int) -> Mapping[int, float]:
                deadline = monotonic() + LATE_S
                while len(found := read_notes(path)) < expected and monotonic() < deadline:
                    sleep(POLL_EVERY_S)
                return found

            yield arrivals


def _choose_cores(count: int) -> set[int]:
    if not hasattr(os, "sched_setaffinity"):
        raise NotMeasured("this system cannot bind a process to cores")
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < count:
        raise NotMeasured(f"{count} cores are needed, there are {len(ours)}")
    return set(ours[:count])


def _check_spark() -> None:
    try:
        from penstock.spark.submission import find_java  # noqa: PLC0415  an optional dependency
    except ModuleNotFoundError as error:
        raise NotMeasured(f"{error.name} is not installed: penstock-outbox[spark]") from error
    try:
        find_java()
    except JavaMissing as error:
        raise NotMeasured(str(error)) from error


def _work(  # noqa: PLR0913, PLR0917  the arguments of a process
    pipe: Pipe,
    output: str,
    engine: EngineName,
    app: str,
    database_url: str,
    redis_url: str,
    streamer: bool,  # noqa: FBT001  the same
    consumers: list[str],
    bound: set[int] | None,
) -> None:
    if bound is not None:
        os.sched_setaffinity(0, bound)
    # Stdout is for data, and Spark's Python processes write errors when Spark ends.
    with open(output, "a", encoding="utf-8") as file:  # noqa: PTH123  a file descriptor
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    ended = threading.Event()

    def listen() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            ended.set()

    threading.Thread(target=listen, daemon=True).start()
    pipeline = load_pipeline(app)
    pipe.send("ready")
    if engine == "spark":
        from penstock.engines.spark import application  # noqa: PLC0415  an optional dependency

        application.run(
            app, pipeline, database_url, redis_url, stop=ended.is_set, consumers=consumers, streamer=streamer
        )
    else:
        from penstock.engines import inline  # noqa: PLC0415  in the child alone

        inline.run(pipeline, database_url, redis_url, stop=ended.is_set, consumers=consumers, streamer=streamer)
