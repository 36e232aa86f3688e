"""An engine at work in a process of its own: inline, or on Spark."""

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

from penstock.bench.measuring import NotMeasured
from penstock.bench.watching.arrivals import FILE, LATE_S, Arrivals, noted
from penstock.bench.watching.processes import READY_S, process
from penstock.database.connections import connect_postgres
from penstock.errors import JavaMissing
from penstock.loading import load_pipeline
from penstock.testing import eventually

Engine = Literal["inline", "spark"]

APP = "penstock.bench.application:four"
NOTING = "penstock.bench.watching.noting:four"

LOOK_EVERY_S = 0.2


@contextmanager
def running(  # noqa: PLR0913  what can be chosen of an engine
    engine: Engine,
    database_url: str,
    redis_url: str,
    *,
    streamer: bool = True,
    consumers: Sequence[str] = (),
    app: str = APP,
    cores: int | None = None,
) -> Iterator[int]:
    """The engine in a process, from when its streamer and its consumers have connected until the block ends.

    It is bound to so many cores, with all that it starts; None leaves it all.  Gives the process's id.

    Raises:
        NotMeasured: Spark or Java is not installed, there are not so many cores, or they did not connect.
    """
    bound = None if cores is None else _first(cores)
    names = ["penstock streamer"] if streamer else []
    names += [f"penstock consumer {consumer}" for consumer in consumers]
    if engine == "spark":
        _check_spark()
    with (
        tempfile.NamedTemporaryFile(prefix="penstock-bench-", mode="r") as said,
        process(
            *(_work, said.name, engine, app, database_url, redis_url, streamer, list(consumers)),
            bound,
        ) as engine_process,
        connect_postgres(database_url, application="bench") as connection,
    ):

        def connected() -> bool:
            row = connection.execute(
                "SELECT count(DISTINCT application_name) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = ANY(%s)",
                [names],
            ).fetchone()
            return row == (len(names),)

        try:
            eventually(connected, f"{', '.join(names)} have connected", timeout_s=READY_S)
        except AssertionError as error:
            raise NotMeasured(
                f"the engine {engine}: {error}; it said: {said.read()[-2000:]}"
            ) from None
        yield engine_process.number


@contextmanager
def effects(
    engine: Engine, database_url: str, redis_url: str, consumers: Sequence[str]
) -> Iterator[Arrivals]:
    """The streamer and the consumers; a record arrives when the transaction of its effect is committed.

    Raises:
        NotMeasured: As ``running``.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        path = Path(directory, "arrivals")
        os.environ[FILE] = str(path)  # the process inherits it
        with running(engine, database_url, redis_url, consumers=consumers, app=NOTING):

            def arrivals(expected: int) -> Mapping[int, float]:
                deadline = monotonic() + LATE_S
                while len(found := noted(path)) < expected and monotonic() < deadline:
                    sleep(LOOK_EVERY_S)
                return found

            yield arrivals


def _first(cores: int) -> set[int]:
    if not hasattr(os, "sched_setaffinity"):
        raise NotMeasured("this system binds no process to cores")
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < cores:
        raise NotMeasured(f"there are no {cores} cores, but {len(ours)}")
    return set(ours[:cores])


def _check_spark() -> None:
    try:
        from penstock.spark.java import find_java  # noqa: PLC0415  not everybody has it
    except ModuleNotFoundError as error:
        raise NotMeasured(f"{error.name} is not installed: penstock[spark]") from error
    try:
        find_java()
    except JavaMissing as error:
        raise NotMeasured(str(error)) from error


def _work(  # noqa: PLR0913, PLR0917  the arguments of a process
    pipe: Pipe,
    said: str,
    engine: Engine,
    app: str,
    database_url: str,
    redis_url: str,
    streamer: bool,  # noqa: FBT001  the same
    consumers: list[str],
    bound: set[int] | None,
) -> None:
    if bound is not None:
        os.sched_setaffinity(0, bound)
    # Stdout is for data; and Spark's Python processes complain of a Spark that has ended.
    with open(said, "a", encoding="utf-8") as file:  # noqa: PTH123  as text is opened
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
        from penstock.spark.engine import application  # noqa: PLC0415  not everybody has it

        application.run(
            app,
            pipeline,
            database_url,
            redis_url,
            stop=ended.is_set,
            consumers=consumers,
            streamer=streamer,
        )
    else:
        from penstock import inline  # noqa: PLC0415  in the child alone

        inline.run(
            pipeline,
            database_url,
            redis_url,
            stop=ended.is_set,
            consumers=consumers,
            streamer=streamer,
        )
