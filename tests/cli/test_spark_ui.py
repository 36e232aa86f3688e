"""What Spark shows of a running pipeline: names; and how it places tasks."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest

from cli.test_commands import effects, stage
from fixtures.command_line import CommandLine
from penstock.database.connections import Connection
from penstock.testing import eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

FRAMES = """
@pipeline.consumer(reads=things, dataframe=True)
def letters(session, frame):
    session.execute(text("INSERT INTO public.letters VALUES (:many)"), {"many": frame.count()})
"""

ONE_SLOT_LESS = """
from penstock.cli.app import main
from penstock.spark.session import Slots

count = Slots.count
Slots.count = lambda slots: count(slots) + 1  # as while the driver has not noticed that a worker is gone
main()
"""


def lines(stderr: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]


class Api:
    """Spark's UI and REST API."""

    def __init__(self, address: str) -> None:
        self._address = address
        [application] = json.loads(self.page("/api/v1/applications"))
        self._application = application["id"]

    def page(self, path: str) -> str:
        with urlopen(self._address + path, timeout=60) as answer:
            return str(answer.read(), "utf-8")

    def __call__(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.page(f"/api/v1/applications/{self._application}/{path}"))
        return found


@pytest.fixture
def api(penstock: CommandLine, connection: Connection, started: Any) -> Iterator[Api]:
    """The UI of `penstock run` with a streamer, a consumer and a set-based consumer, at the address in its log."""
    source = penstock.directory / "shop.py"
    source.write_text(source.read_text() + FRAMES)
    connection.execute("CREATE TABLE public.letters (many int)")
    stage(connection, 10)
    process = started("run", "--engine", "spark", "--log-format", "json", "--conf", "spark.ui.enabled=true")
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r'"ui": "(http://[^"]+)"', line):
            break
    else:
        pytest.fail("".join(said))
    yield Api(found[1])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=180)


def test_the_ui_names_what_runs(api: Api, connection: Connection) -> None:
    """It named a line of Spark's code."""
    eventually(
        lambda: connection.execute("SELECT FROM public.letters").fetchall() and effects(connection) == 10,
        "all is applied",
        timeout_s=300,
    )

    stages, jobs = api("stages"), api("jobs")
    assert not [s["name"] for s in stages if "NativeMethodAccessorImpl" in s["name"]]
    assert {"epochs", "consumer letters"} <= {s["name"] for s in stages}
    descriptions = {job["description"] for job in jobs}
    assert any(d.startswith("epoch 0: streamer; reader[") for d in descriptions)
    assert "consumer letters" in descriptions


@pytest.mark.storm  # what only Spark knows of it is in tests/spark/test_schedule.py
def test_a_task_without_a_slot_hands_its_work_to_those_that_have_one(
    penstock: CommandLine, connection: Connection
) -> None:
    """Spark's stages are recognised by their name: without it nobody notices that a task waits."""
    stage(connection, 10)
    process = subprocess.Popen(
        [sys.executable, "-c", ONE_SLOT_LESS, "run", "--engine", "spark", "--master", "local[2,4]"],
        cwd=penstock.directory,
        env=penstock.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: effects(connection) == 10, "all is applied", timeout_s=300)
    finally:
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=180)
    [warned] = [line for line in lines(stderr) if line["event"] == "tasks waiting for slots"]
    assert (warned["slots"], warned["task_count"]) == (2, 3)
