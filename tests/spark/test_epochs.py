"""Epochs: the tasks of an epoch begin and end together."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import redis
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.crashing import THINGS
from fixtures.truth import TABLES, await_everything, change
from penstock.consuming import Consumed, make_worker
from penstock.database.connections import Connection
from penstock.engines.spark import epoch_query, epochs
from penstock.engines.spark.assignment import Part, Task
from penstock.engines.spark.control_channel import ControlServer, Line, TaskPlan
from penstock.engines.spark.epoch_query import LASTS_S, EpochQuery, Schedule
from penstock.engines.spark.epochs import COUNTS, EpochPartition, EpochsReader, EpochsSource, TaskCounts
from penstock.errors import DriverUnreachable
from penstock.spark.session import Slots
from penstock.streaming import Streamer
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


def serve(
    tasks: tuple[Task, ...], receive: Callable[[Line], None] = lambda _: None
) -> tuple[ControlServer, dict[str, str]]:
    """A driver with one plan, and the options of its readers."""
    server = ControlServer("127.0.0.1", receive=receive, plan=lambda: TaskPlan("first", tasks))
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


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_task_works_as_the_options_of_its_driver_say(value: str) -> None:
    """Behind a pooler no statement is prepared; events are sent to a driver that observes them."""
    received: list[Line] = []
    together = Task((*TASKS[0].parts, *TASKS[1].parts))
    server, options = serve((together,), received.append)
    reader = EpochsReader({**options, "seconds": "0", "prepare": value, "observed": value})
    with (
        patch("penstock.streaming.Streamer", wraps=Streamer) as streamers,
        patch("penstock.consuming.make_worker", wraps=make_worker) as workers,
    ):
        [(name, *counts, _, unreachable)] = reader.read(reader.partitions({}, {})[0])
    eventually(lambda: received, "the task has reported")
    server.close()

    assert (name, counts, unreachable) == ("streamer + one[0,1]", [0] * len(COUNTS), None)
    assert [made.call_args.kwargs["prepare"] for made in (streamers, workers)] == [value == "true"] * 2
    assert [len(line.get("events", ())) for line in received] == [2 if value == "true" else 0]


def test_an_error_of_a_task_is_sent_to_the_driver_and_that_it_is_unreachable_is_its_row(
    set_constants: SetConstants,
) -> None:
    set_constants("engines.spark.epochs", UNREACHABLE_PAUSE_S=0.0)
    received: list[Line] = []
    server, options = serve(TASKS, received.append)
    failing = EpochsReader({**options, "seconds": "600", "app": "nowhere:nothing"})
    lost = EpochsReader({**options, "seconds": "600", "control": "127.0.0.1:1"})

    [row] = failing.read(failing.partitions({}, {})[0])
    [unreachable] = lost.read(EpochPartition(TASKS[0], "first"))

    eventually(lambda: len(received) == 2, "the error and the counts arrive")
    server.close()
    assert (received[0]["error"], received[0]["task"]) == ("DeclarationError", "streamer")
    assert "importing nowhere" in received[0]["message"]
    assert row[-1] is None
    assert "cannot connect to the driver at 127.0.0.1:1" in unreachable[-1]


def test_counts_are_sent_once_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent, totals = [100.0], list[Line](), dict.fromkeys(COUNTS, 0)
    monkeypatch.setattr(epochs, "monotonic", lambda: now[0])
    counts = TaskCounts("t", totals, sent.append)
    for seconds, published in ((0, 1), (0.75, 2), (0.25, 4), (0.75, 8)):
        now[0] += seconds
        counts.add(published=published, resent=0)
    counts.send()
    counts.add_consumed(Consumed(applied=1, skipped=2, cancelled=4, dead=8, backfilled=16))
    counts.send()

    consumed = {"applied": 1, "skipped": 6, "dead": 8, "backfilled": 16}
    expected = [{"published": 1}, {"published": 6}, {"published": 8}, consumed]
    assert sent == [{"task": "t", **line} for line in expected]
    assert totals == {**dict.fromkeys(COUNTS, 0), "published": 15, **consumed}


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(epoch_query, "monotonic", lambda: now[0])
    return now


REACHED: Any = SimpleNamespace(was_reached=True, was_asked=True)


def make_query(monkeypatch: pytest.MonkeyPatch, *ends: str) -> tuple[EpochQuery, list[str]]:
    """A query that ends at once, with these texts, one after the other; and those that it has begun with."""
    begun: list[str] = []
    nothing: Any = None  # is asked of Spark
    epochs = EpochQuery(nothing, {}, nothing, "nowhere")

    def start() -> Any:
        begun.append(ends[len(begun)])
        return SimpleNamespace(isActive=False, lastProgress=None, exception=lambda: begun[-1])

    monkeypatch.setattr(epochs, "start", start)
    return epochs, begun


def test_a_query_that_ends_is_started_again_after_pauses_that_grow_until_one_has_run_well(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, begun = make_query(monkeypatch, "[A] one\nof a payload", "", "three", "four", "five")
    lasting = [0.0, 0.0, LASTS_S - 1, LASTS_S + 1, 0.0]
    with capture_logs() as logs:
        for number, seconds in enumerate(lasting, 1):
            query.check(REACHED)
            assert len(begun) == number
            clock[0] += seconds
            query.failure = "as an epoch says" if number == 3 else None
            query.check(REACHED)
            ended_at, clock[0] = clock[0], query._restart_at - 0.001
            query.check(REACHED)
            assert (len(begun), query.query) == (number, None), "it is not due yet"
            clock[0] = query._restart_at
            assert clock[0] - ended_at == pytest.approx(logs[-1]["retry_s"])

    assert [(line["reason"], line["retry_s"]) for line in logs] == [
        ("[A] one", 0.2),
        ("it was stopped", 0.4),
        ("as an epoch says", 0.8),
        ("four", 0.2),
        ("five", 0.4),
    ]


@pytest.mark.parametrize("was_asked", [False, True])
def test_a_planner_that_never_reached_the_driver_ends_the_run_and_one_that_did_once_is_tried_again(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, *, was_asked: bool
) -> None:
    query, _ = make_query(monkeypatch, "penstock.errors.DriverUnreachable: no answer")
    control: Any = SimpleNamespace(was_reached=True, was_asked=was_asked)
    query.check(control)
    if was_asked:
        query.check(control)
        assert query.query is None
    else:
        with pytest.raises(DriverUnreachable, match=r"^no answer$"):
            query.check(control)
