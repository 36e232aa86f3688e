"""Epochs: the tasks of an epoch begin and end together."""

import threading
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

from fixtures.crashing import THINGS
from fixtures.truth import TABLES, await_everything, change
from penstock.database.connections import Connection
from penstock.engines.spark.assignment import Part, Task
from penstock.engines.spark.control_channel import ControlServer, TaskPlan
from penstock.engines.spark.epoch_query import EpochQuery, Schedule
from penstock.engines.spark.epochs import EpochsReader, EpochsSource
from penstock.errors import DriverUnreachable
from penstock.spark.session import Slots
from penstock.streaming.sequencer import MAX_INLINE_RECORDS
from penstock.testing import eventually

TASKS = (Task((Part(None),)), Task((Part("one", (0, 1)),)))
SHARES = (Task((Part(None, share="1/2"),)), Task((Part(None, share="2/2"), Part("one", (0, 1)))))
OPTIONS = {"app": "fixtures.crashing:PIPELINE", "idle": "0.01", "prepare": "true", "observed": "false"}


@pytest.fixture(autouse=True)
def _servers(connection: Connection, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connection.execute(TABLES)
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", database_url)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", redis_url)


def serve(tasks: tuple[Task, ...]) -> tuple[ControlServer, dict[str, str]]:
    """A driver with one plan, and the options of its readers."""
    server = ControlServer("127.0.0.1", receive=lambda _: None, plan=lambda: TaskPlan("first", tasks))
    address = f"{server.address.host}:{server.address.port}"
    return server, {**OPTIONS, "control": address, "token": server.address.token}


@pytest.mark.slow
def test_several_streamers_of_an_epoch_publish_everything_and_each_its_share(
    connection: Connection, redis_client: redis.Redis
) -> None:
    server, options = serve(SHARES)
    reader = EpochsReader({**options, "seconds": "600"})
    rows: list[tuple[Any, ...]] = []
    threads = [
        threading.Thread(target=lambda task=task: rows.extend(reader.read(task)), daemon=True)
        for task in reader.partitions({"epoch": 0}, {"epoch": 1})
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: server.connected == len(SHARES), "the tasks run")
    for _ in range(5):
        change(connection, [f"k{number}" for number in range(2 * MAX_INLINE_RECORDS)])
    records = await_everything(connection, redis_client, THINGS, ["one"])
    server.close()
    for thread in threads:
        thread.join(20)

    published = {row[0]: row[2] for row in rows}
    assert sum(published.values()) == records
    assert min(published.values()) > 0


@pytest.mark.slow  # an epoch of two seconds
def test_a_restarted_task_ends_with_its_epoch_and_not_a_full_epoch_later() -> None:
    """Otherwise nothing is streamed until then: the next epoch, which runs the streamer, waits for this one's last task."""
    server, options = serve(TASKS)
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
    schedule = Schedule({}, Slots(spark), streamers=1, reserved=0)
    epochs = EpochQuery(spark, options, schedule, str(tmp_path))
    for _ in range(3):
        epochs.start().stop()

    assert len(list(tmp_path.iterdir())) == 1


def test_a_planner_that_cannot_reach_the_driver_ends_the_run(spark: SparkSession, tmp_path: Path) -> None:
    """On Spark, because its text has to tell; some seconds.  Its checkpoint is on this machine, whatever the default is."""
    spark.dataSource.register(EpochsSource)
    options = {"app": "nowhere:nothing", "control": "127.0.0.1:1", "token": "", "seconds": "1"}
    schedule = Schedule({}, Slots(spark), streamers=1, reserved=0)
    epochs = EpochQuery(spark, options, schedule, str(tmp_path))
    server = ControlServer("127.0.0.1", receive=lambda _: None, plan=lambda: TaskPlan("", ()))

    def ends() -> bool:
        try:
            epochs.check(server)
        except DriverUnreachable as error:
            return "cannot connect to the driver at 127.0.0.1:1" in str(error)
        return False

    eventually(ends, "the run ends")
    server.close()
