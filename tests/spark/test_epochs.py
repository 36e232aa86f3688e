"""Epochs: the tasks of an epoch begin and end together."""

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from fixtures.truth import TABLES
from penstock.database.connections import Connection
from penstock.spark.engine.application import _start_epochs
from penstock.spark.engine.assignment import Part, Task
from penstock.spark.engine.control_channel import ControlServer, Plan
from penstock.spark.engine.epochs import EpochsReader, EpochsSource
from penstock.testing import eventually

TASKS = (Task((Part(None),)), Task((Part("one", (0, 1)),)))


def test_a_restarted_task_ends_with_its_epoch_and_not_a_full_epoch_later(
    connection: Connection, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nothing is streamed until then: the next epoch, which runs the streamer, waits for this one's last task."""
    connection.execute(TABLES)
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", database_url)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)
    server = ControlServer("127.0.0.1", receive=lambda _: None, plan=lambda: Plan("first", TASKS))
    options = {
        "app": "fixtures.crashing:PIPELINE",
        "control": f"{server.address.host}:{server.address.port}",
        "token": server.address.token,
        "idle": "0.01",
        "prepare": "true",
        "resend": "0",
    }
    first = EpochsReader({**options, "seconds": "2"})
    again = EpochsReader({**options, "seconds": "600"})
    streamer, consumer = first.partitions({"epoch": 0}, {"epoch": 1})

    rows: list[object] = []
    late = threading.Thread(target=lambda: rows.extend(again.read(consumer)), daemon=True)
    late.start()
    eventually(lambda: server.connected == 1, "the consumer runs")
    rows.extend(first.read(streamer))

    late.join(20)
    ended = not late.is_alive()
    server.close()
    assert ended
    assert len(rows) == len(TASKS)


def test_a_restarted_query_leaves_one_directory(spark: SparkSession, tmp_path: Path) -> None:
    """Each restart left another one until the end of the run."""
    spark.dataSource.register(EpochsSource)
    options = {"app": "nowhere:nothing", "control": "127.0.0.1:1", "token": "", "seconds": "1"}
    for _ in range(3):
        _start_epochs(spark, options, str(tmp_path)).stop()

    assert len(list(tmp_path.iterdir())) == 1
