"""The pipeline on a Spark cluster: executors, workers and drivers die and come, under load."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Self

import pytest

from fixtures.spark_cluster import SparkCluster, running_cluster
from penstock.database.connections import Connection, connect_postgres
from penstock.demo.audit import CONSUMERS, INDEX
from penstock.demo.demonstration import Demo
from penstock.demo.rides import REPEAT_CHANCE
from penstock.demo.supervision import SupervisedProcess
from penstock.embedded import EmbeddedRedis

pytestmark = [pytest.mark.spark, pytest.mark.storm, pytest.mark.timeout(900)]

RECOVERY_S = 60.0
"""Bound, in seconds, that tells a recovery from a task that waits for ever; on an idle machine it takes 5 s."""

_IS_THERE = "SELECT to_regclass('rocket_rides_log.checkpoints')"
_APPLIED = """
SELECT consumer, sum("offset")::bigint FROM rocket_rides_log.checkpoints WHERE consumer = ANY(%(names)s) GROUP BY consumer
"""


@pytest.fixture
def cluster() -> Iterator[SparkCluster]:
    with running_cluster(workers=2, cores=2) as made:
        yield made


@dataclass
class OnCluster(Demo):
    """Rocket Rides with the pipeline on a cluster."""

    master: str = ""

    def _start_pipeline(self) -> None:
        command = ["penstock", "run", "--app", "penstock.demo.rides:pipeline"]
        command += ["--engine", "spark"]
        command += ["--master", self.master, "--conf", "spark.executor.memory=512m"]
        command += ["--conf", "spark.ui.enabled=false"]
        command += ["--conf", f"spark.executorEnv.{REPEAT_CHANCE}=0.05"]
        self._started.append(SupervisedProcess(command, self._environment()))
        self._started[-1].start()


@dataclass
class Watch:
    """When each consumer moved on, sampled ten times a second.

    Attributes:
        moved: Times by consumer, on the clock of ``monotonic``.
    """

    database_url: str
    moved: dict[str, list[float]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before: dict[str, int] = {}
        with connect_postgres(self.database_url, application="watch") as connection:
            while not self._stop.wait(0.1):
                if connection.execute(_IS_THERE).fetchone() == (None,):
                    continue
                for name, offset in connection.execute(_APPLIED, {"names": [*CONSUMERS, INDEX]}).fetchall():
                    if before.get(name) != offset:
                        self.moved.setdefault(name, []).append(monotonic())
                    before[name] = offset

    @property
    def has_ended(self) -> bool:
        return self._stop.is_set()

    def recovery_s(self, since: float) -> float:
        """How long after ``since`` until every consumer had moved on from a pause of more than a second, or 0."""
        return max(_end_of_pause(times, since) - since for times in self.moved.values())


def _end_of_pause(times: list[float], since: float) -> float:
    """The end of the longest pause that began within 5 s."""
    ends = [(after - before, after) for before, after in pairwise(times) if since - 1 < before < since + 5]
    length, end = max(ends, default=(0.0, since))
    return end if length > 1 else since


def test_lost_executors_workers_and_drivers_lose_and_double_nothing(
    cluster: SparkCluster, connection: Connection, database_url: str, tmp_path: Path
) -> None:
    """Guarantees 2, 3 and 22, on two workers of two cores each."""
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    demo = OnCluster(
        "spark", 32.0, database_url, server.url, lambda: False, reconcile=False, kills=1, master=cluster.url
    )
    events: dict[str, float] = {}

    def hurt() -> None:
        pause, names = threading.Event(), {*CONSUMERS, INDEX}
        while watch.moved.keys() != names:
            if pause.wait(0.1) or watch.has_ended:
                return
        harms: tuple[tuple[str, Callable[[], None]], ...] = (
            ("an executor is killed", lambda: os.kill(cluster.executors("w1")[0], signal.SIGKILL)),
            ("a worker is killed", lambda: cluster.kill("w1")),
            ("a worker comes", lambda: cluster.add_worker("w3", cores=2)),
            ("the driver is killed", lambda: os.kill(demo._started[0].pid or 0, signal.SIGKILL)),
        )
        for name, what in harms:
            pause.wait(4)
            events[name] = monotonic()
            what()

    try:
        with Watch(database_url) as watch:
            hurting = threading.Thread(target=hurt, daemon=True)
            hurting.start()
            progress = demo.run()
            hurting.join(1)
    finally:
        server.remove()

    recovered = {name: round(watch.recovery_s(at), 1) for name, at in events.items()}
    print("recovered within, in seconds:", recovered)  # noqa: T201  shown by pytest -s
    assert len(events) == 4
    assert progress.equal
    assert recovered["an executor is killed"] <= RECOVERY_S
    assert recovered["a worker is killed"] <= RECOVERY_S
