"""The demo reports equality when its copies are equal, and a difference when they are not."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it ships no types
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from fixtures.clients import connect_redis
from fixtures.command_line import CommandLine
from fixtures.forking import Descriptor, Forked, redirect
from penstock.consuming import make_worker
from penstock.database.connections import Connection, make_engine
from penstock.demo.api import application
from penstock.demo.audit import audit
from penstock.demo.demonstration import Demo, Simulator
from penstock.demo.drift import CHANGED, DELETED, INVENTED, UNSTAGED
from penstock.demo.rides import pipeline
from penstock.demo.supervision import start_child
from penstock.embedded import EmbeddedRedis
from penstock.embedded.processes import is_alive
from penstock.streaming import Streamer
from penstock.testing import eventually


@pytest.fixture
def api(database_url: str, redis_url: str) -> Iterator[TestClient]:
    Demo("inline", 1, database_url, redis_url, lambda: False)._reset()
    engine = make_engine(database_url, application="test")
    yield TestClient(application(engine))
    engine.dispose()


def staged(connection: Connection) -> int:
    (row,) = connection.execute("SELECT count(*) FROM rocket_rides_log.staged_records").fetchall()
    return int(row[0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Please specify parameter 'distance'."),
        ({"distance": ""}, "Please specify parameter 'distance'."),
        ({"distance": "far"}, "Parameter 'distance' must be a floating-point number."),
    ],
)
def test_invalid_input_is_refused_as_by_the_original(
    api: TestClient, connection: Connection, body: dict[str, str], message: str
) -> None:
    answer = api.post("/rides", json=body)

    assert (answer.status_code, answer.json()["error"]) == (422, message)
    assert staged(connection) == 0


def test_a_form_books_a_ride(api: TestClient) -> None:
    """``curl -d distance=123.0``, as the article has it."""
    assert "distance=123.00m" in api.post("/rides", data={"distance": "123.0"}).json()["message"]


def test_a_declined_card_leaves_no_ride_and_no_record(api: TestClient, connection: Connection) -> None:
    """Guarantee 8."""
    assert api.post("/rides", json={"distance": 5.0}, headers={"x-decline": "1"}).status_code == 402
    assert staged(connection) == 0


def test_every_change_is_staged_and_the_check_finds_losses_and_doubles(
    api: TestClient, connection: Connection, database_url: str, redis_url: str
) -> None:
    ride = api.post("/rides", json={"distance": 100.0}).json()["id"]
    other = api.post("/rides", json={"distance": 50.5}).json()["id"]
    assert api.patch(f"/rides/{ride}", json={"distance": 70.0}).status_code == 204
    assert api.delete(f"/rides/{other}").status_code == 204
    assert api.delete("/rides/999").status_code == 404
    streamer = Streamer(pipeline, database_url, redis_url)
    streamer.drain()
    streamer.close()
    for consumer in pipeline.consumers.values():
        worker = make_worker(pipeline, consumer, database_url, redis_url)
        worker.drain()
        worker.close()
    with connect_redis(redis_url) as client:
        now = audit(connection, client)
        assert (now.equal, now.staged, now.canonical_cents) == (True, 4, 140)

        connection.execute("DELETE FROM rocket_rides.effects WHERE record_id = 1 AND consumer = 'ride_copies'")
        assert (audit(connection, client).lost, audit(connection, client).equal) == (1, False)

        connection.execute("INSERT INTO rocket_rides.effects VALUES ('ride_totals', 1, 0, 1, 1)")
        assert audit(connection, client).doubled == 1


def test_the_check_finds_an_index_that_missed_a_change(
    api: TestClient, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 6."""
    kept, gone = (api.post("/rides", json={"distance": 10.0}).json()["id"] for _ in range(2))
    api.delete(f"/rides/{gone}")
    streamer = Streamer(pipeline, database_url, redis_url)
    streamer.drain()
    streamer.close()
    worker = make_worker(pipeline, pipeline.get_consumer("ride_index"), database_url, redis_url)
    worker.drain()
    worker.close()

    with connect_redis(redis_url) as client:
        index = audit(connection, client).index
        assert (index.records, index.applied, index.position, index.different) == (3, 2, 3, 0)
        assert index.total_cents == 20

        connection.execute(f"UPDATE rocket_rides.rides SET status = 'lost' WHERE id = {kept}".encode())
        assert audit(connection, client).index.different == 2


@pytest.mark.parametrize(
    ("engine", "seconds", "drift"),
    [
        pytest.param(*("inline", "3", "--no-reconcile"), marks=pytest.mark.slow),
        pytest.param(*("stealing", "10", "--no-reconcile"), marks=[pytest.mark.storm, pytest.mark.timeout(600)]),
        pytest.param(*("stealing", "5", "--reconcile"), marks=[pytest.mark.chaos, pytest.mark.timeout(600)]),
        pytest.param(
            *("spark", "20", "--reconcile"), marks=[pytest.mark.storm, pytest.mark.spark, pytest.mark.timeout(600)]
        ),
    ],
)
def test_the_demo_ends_equal(bare: CommandLine, engine: str, seconds: str, drift: str) -> None:
    """Guarantees 1, 4, 5, 6 and 28 under crashes, double sends and a kill."""
    mark = uuid.uuid4().hex
    done = bare(*("demo", "--duration", seconds, "--engine", engine, drift, "--json"), DEMO_TEST=mark)
    sys.stderr.write(done.stderr)
    assert "HTTP Request" not in done.stderr, "the requests of the simulated clients are not logged"
    eventually(lambda: not find_processes(mark), "no process is left")
    report = json.loads(done.stdout)

    assert (done.returncode, report["equal"], report["lost"], report["doubled"]) == (0, True, 0, 0)
    assert report["staged"] == report["published"] > 10
    assert report["kills"] >= 1
    assert report["crashes"] >= int(seconds) // 20  # a consumer lives at most nine seconds
    assert report["out_of_order"] == 0
    check_recruits(report) if engine == "stealing" else None
    if engine != "stealing" and report["staged"] > 500:  # slices begin at the checkpoints
        assert report["skipped"] > 0
    assert {c["total_cents"] for c in report["consumers"].values()} == {report["canonical_cents"]}
    if (engine, drift) == ("inline", "--no-reconcile"):
        check_metrics(bare, report)
    index = report["index"]
    assert (index["different"], index["total_cents"]) == (0, report["canonical_cents"])
    if drift == "--no-reconcile":
        assert (report["drift"], index["records"]) == (None, report["staged"])
    else:
        seeded = CHANGED + DELETED + INVENTED + UNSTAGED + 1
        assert report["drift"] == {"seeded": seeded, "found": seeded, "repaired": seeded}
        late_consumer = report["late_consumer"]
        assert (late_consumer["different"], late_consumer["total_cents"]) == (0, report["canonical_cents"])
        assert late_consumer["applied"] < report["staged"]


def check_metrics(bare: CommandLine, report: dict[str, Any]) -> None:
    """What is exported after kills, and after a restart of both servers, is the demo's own account, to the record."""
    demo = ("--app", "penstock.demo.rides:pipeline", "--data-directory", ".penstock")
    printed = bare("metrics", *demo).stdout
    samples = [s for family in text_string_to_metric_families(printed) for s in family.samples]

    def total(name: str, **labels: str) -> float:
        return sum(s.value for s in samples if s.name == f"penstock_{name}" and s.labels.items() >= labels.items())

    assert total("sequenced_records_total", channel="rides") == report["staged"]
    for name, consumer in report["consumers"].items():
        assert total("consumer_applied_records_total", consumer=name) == consumer["applied"]
        assert total("consumer_lag_records", consumer=name) == 0


def check_recruits(report: dict[str, Any]) -> None:
    """A part of the requests was recruited, and did all the work."""
    recruits, requests = report["recruits"], report["requests"]
    assert 0 < recruits["finished"] < recruits["recruited"] < requests * 0.5
    assert recruits["failed"] == 0


def test_run_refuses_the_engine_whose_work_requests_do(bare: CommandLine) -> None:
    """`run` has nothing to run on this engine."""
    done = bare(
        *("run", "--engine", "stealing", "--app", "penstock.demo.rides:pipeline"),
        *("--database-url", "postgresql:///none", "--redis-url", "redis://none"),
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "the requests to your application do the work" in done.stderr


def test_clients_that_never_started_can_be_stopped() -> None:
    Simulator("http://localhost").stop()


def find_processes(mark: str) -> list[int]:
    """Returns all processes that inherited the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("DEMO_TEST") == mark:
                found.append(process.pid)
    return found


def own(directory: Path, *outputs: Descriptor) -> None:
    """Starts what the demo starts, a server and a child, and waits."""
    redirect(directory, dict(os.environ), *outputs)
    server = EmbeddedRedis(directory / "redis")
    server.start()
    child = start_child(["http.server", "0"], os.environ)
    sys.stdout.write(f"{server.process_id} {child.pid}\n")
    sys.stdout.flush()
    signal.pause()


def test_servers_and_children_end_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    """Guarantee 27."""
    owner = Forked(own, tmp_path)
    owned = [int(word) for word in owner.stdout.readline().split()]
    assert len(owned) == 2
    assert all(map(is_alive, owned))

    owner.end()

    eventually(lambda: not any(map(is_alive, owned)), "both have ended", timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [[signal.SIGKILL], pytest.param([signal.SIGINT, signal.SIGINT], marks=pytest.mark.storm)]
)
@pytest.mark.parametrize(
    "engine",
    [
        "inline",
        "stealing",
        pytest.param("spark", marks=[pytest.mark.storm, pytest.mark.spark, pytest.mark.timeout(600)]),
    ],
)
def test_no_process_outlives_the_demo(tmp_path: Path, engine: str, signals: list[signal.Signals]) -> None:
    """Guarantee 27: killed midway, or asked twice to stop."""
    mark = uuid.uuid4().hex
    with (tmp_path / "output").open("wb") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", "penstock", "demo", "--duration", "60", "--engine", engine],
            cwd=tmp_path,
            env=os.environ | {"DEMO_TEST": mark},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    eventually(lambda: b"running: staged" in (tmp_path / "output").read_bytes(), "the demo runs", timeout_s=240)
    assert len(find_processes(mark)) > 4

    for number in signals:
        demo.send_signal(number)
    demo.wait(240)

    eventually(lambda: not find_processes(mark), "all its processes have ended", timeout_s=120)
