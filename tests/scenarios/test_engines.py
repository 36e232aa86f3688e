"""The same stories on both engines: ``penstock run`` as a process of its own, in a directory with an application."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fixtures.flow import stage_rows
from penstock import Log
from penstock.postgres import Connection
from penstock.testing import eventually

APPLICATION = """
import os
from sqlalchemy import text
from penstock import Log, Pipeline

things = Log("things", shards=2)
pipeline = Pipeline([things])

def note(session, consumer, records):
    session.execute(
        text("INSERT INTO public.effects SELECT :consumer, unnest(CAST(:ids AS bigint[]))"),
        {"consumer": consumer, "ids": [record.id for record in records]},
    )

@pipeline.consumer(reads=things)
def one(session, records):
    note(session, "one", records)

@pipeline.consumer(reads=things, attempts=1)
def two(session, records):
    note(session, "two", records)
    if any(record.key == "poison" for record in records):
        raise ValueError("poison")
"""

ENGINES = ["inline", pytest.param("spark", marks=pytest.mark.spark)]
READY_S = 60.0
Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def things() -> Log:
    return Log("things", shards=2)


@pytest.fixture(params=ENGINES)
def start(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    database_url: str,
    redis_url: str,
    connection: Connection,
) -> Iterator[Start]:
    """Starts the pipeline on the engine; whatever still runs at the end is killed."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    connection.execute("CREATE TABLE public.effects (consumer text, record_id bigint)")
    command = [
        sys.executable,
        "-m",
        "penstock",
        "run",
        "--app",
        "shop:pipeline",
        "--engine",
        request.param,
    ]
    environment = os.environ | {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_REDIS_URL": redis_url,
    }
    started: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def effects(connection: Connection, consumer: str) -> list[int]:
    rows = connection.execute(
        "SELECT record_id FROM public.effects WHERE consumer = %s ORDER BY 1", (consumer,)
    )
    return [record_id for (record_id,) in rows]


def test_records_have_one_effect_across_a_kill_a_poison_record_and_a_clean_stop(
    start: Start, connection: Connection, things: Log
) -> None:
    """Guarantees 4, 21 and 27: killed under load, started again, told to stop: lost 0, doubled 0."""
    process = start()
    stage_rows(connection, things, 200, "first ")
    eventually(lambda: len(effects(connection, "one")) >= 100, "records flow", timeout_s=READY_S)

    stage_rows(connection, things, 300, "second ")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    stage_rows(connection, things, 100, "third ")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 0, 'poison', 'insert', 'thing', '{}')"
    )
    process = start()

    everything = list(range(1, 602))
    eventually(
        lambda: effects(connection, "one") == everything, "all of it, once", timeout_s=READY_S
    )
    eventually(
        lambda: effects(connection, "two") == everything[:-1], "but the poison", timeout_s=READY_S
    )
    assert connection.execute("SELECT consumer, key FROM penstock.dead_letters").fetchall() == [
        ("two", "poison")
    ]

    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    stage_rows(connection, things, 10, "after ")
    assert effects(connection, "one") == everything
