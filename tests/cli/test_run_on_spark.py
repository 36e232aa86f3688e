"""``penstock run`` on Spark ends cleanly, whichever of its processes get the signal, and names a JVM that was killed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships no types
import pytest

from cli.test_commands import effects, stage
from fixtures.command_line import PENSTOCK, CommandLine
from fixtures.probing import ask
from penstock.database.connections import Connection
from penstock.embedded.processes import free_port
from penstock.testing import eventually

# Each starts a JVM, because it ends with the test, or before.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Start = Callable[..., subprocess.Popen[str]]

ELSEWHERE = "spark.hadoop.fs.defaultFS=hdfs://nowhere.invalid:8020"
"""Hadoop's default file system, as on YARN or EMR: a path without a scheme would be one of its."""


@pytest.fixture
def port() -> int:
    """Where it answers probes."""
    return free_port()


@pytest.fixture
def start(penstock: CommandLine, connection: Connection, temporary: Path, port: int) -> Iterator[Start]:
    """Starts ``penstock run`` on Spark, behind another command if one is given, as the leader of its own process group."""
    stage(connection, 10)
    started: list[subprocess.Popen[str]] = []

    def start(*before: str, within: Path = temporary) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*before, PENSTOCK, "run", "--engine", "spark", "--conf", ELSEWHERE, "--listen", str(port)],
            cwd=penstock.directory,
            env=penstock.environment_within(within),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            for each in family(process):
                each.kill()
            process.kill()
            process.communicate()


@pytest.fixture
def starting(start: Start) -> subprocess.Popen[str]:
    """The process, as it starts."""
    return start()


@pytest.fixture
def running(starting: subprocess.Popen[str], connection: Connection) -> subprocess.Popen[str]:
    """The same, at work."""
    eventually(lambda: effects(connection) == 10, "all is applied", timeout_s=300)
    return starting


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The process, its JVM, and the Python processes of its tasks."""
    if process.poll() is not None:
        return []
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def to_the_group(process: subprocess.Popen[str]) -> None:
    """As a shell does, and ``timeout``."""
    os.killpg(process.pid, signal.SIGTERM)


def to_all(process: subprocess.Popen[str]) -> None:
    """As systemd does by default."""
    for each in family(process):
        with suppress(psutil.NoSuchProcess):  # it has ended with those before
            each.send_signal(signal.SIGTERM)


def interrupt(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C does."""
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.parametrize("send", [pytest.param(to_the_group, marks=pytest.mark.storm), to_all])
def test_a_signal_to_all_its_processes_ends_it_cleanly(
    running: subprocess.Popen[str], temporary: Path, port: int, send: Callable[[subprocess.Popen[str]], None]
) -> None:
    """Until then it answers probes, with what all its tasks have done."""
    applied = (
        'penstock_delivered_records_total{channel="things",consumer="reader",outcome="applied",schema="penstock"} 10.0'
    )
    eventually(lambda: applied in ask(port, path="/metrics")[1], "the driver has counted what its tasks applied")
    eventually(lambda: ask(port, path="/readyz") == (200, "ok\n"), "each of its tasks has begun")

    send(running)
    _, said = running.communicate(timeout=180)

    assert running.returncode == 0
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "stopped"
    assert list(temporary.iterdir()) == []


def test_a_signal_while_it_starts_ends_it_cleanly(starting: subprocess.Popen[str], temporary: Path) -> None:
    """While Spark starts in Java; the next one is sent before Java answers."""
    eventually(
        lambda: any(each.name() in ("java", "bash") for each in family(starting)), "Java is started", timeout_s=300
    )
    with suppress(subprocess.TimeoutExpired):
        starting.wait(3.0)
    to_the_group(starting)
    _, said = starting.communicate(timeout=180)

    assert starting.returncode == 0
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "stopped"
    assert list(temporary.iterdir()) == []


def test_no_jvm_is_left_if_nohup_started_it(start: Start, temporary: Path) -> None:
    """Java ignores SIGHUP then, too."""
    process = start("nohup")
    eventually(lambda: any(each.name() == "java" for each in family(process)), "Java is started", timeout_s=300)
    started = family(process)
    to_the_group(process)

    assert process.wait(180) == 0
    gone, alive = psutil.wait_procs(started, timeout=5)
    for each in alive:
        each.kill()
    assert alive == []
    assert process.communicate()[1].splitlines()[-1] == "stopped"
    assert list(temporary.iterdir()) == []
    assert len(gone) == len(started)


def test_a_directory_that_spark_does_not_use_may_vanish_and_ctrl_c_ends_it_cleanly(
    start: Start, temporary: Path, connection: Connection
) -> None:
    """As on a cluster: what cleans temporary files removes it as empty, days later."""
    unused = temporary / "too-long-with-what-comes-below-it"
    unused.mkdir()
    process = start(within=unused)
    eventually(lambda: effects(connection) == 10, "all is applied", timeout_s=300)
    [directory] = unused.glob("penstock-java-*")
    directory.rmdir()
    stage(connection, 10)

    eventually(lambda: effects(connection) == 20, "the run goes on", timeout_s=300)
    interrupt(process)
    _, said = process.communicate(timeout=180)

    assert process.returncode == 0
    # Nothing more than its log: Spark's Python workers outlive their connections by a moment, more often than not.
    javas = ("Picked up JAVA_TOOL_OPTIONS", "WARNING: Using incubator modules")
    others = [line for line in said.splitlines() if not line.startswith(("{", *javas))]
    assert others == ["stopped"], said


ENDING = """
import sys
from threading import Timer
from pyspark import SparkContext
from penstock.cli.app import main
from penstock.engines.spark import application

class Control(application.ControlServer):
    \"\"\"As while Java is killed: its connections are gone before it is.\"\"\"

    def check(self):
        Timer(0.5, SparkContext._gateway.proc.kill).start()
        SparkContext._gateway.shutdown()
        raise ConnectionError

application.ControlServer = Control
del sys.argv[0]
main()
"""


def test_a_jvm_that_was_killed_is_named_and_then_the_run_ends_as_ever(start: Start) -> None:
    process = start(sys.executable, "-c", ENDING)
    _, said = process.communicate(timeout=300)

    assert process.returncode == 3, said
    assert "the JVM of Spark has ended (killed by SIGKILL)" in said.splitlines()[-2]
    assert '"event": "stopped"' in said


UNREACHABLE = """
from dataclasses import replace
from penstock.cli.app import main
from penstock.engines.spark import application

class Elsewhere(application.ControlServer):
    \"\"\"As behind a firewall: the tasks are given a port at which nobody listens; the plan comes all the same.\"\"\"

    def _send_plan(self, connection):
        super()._send_plan(connection)
        self._stop_listening()

application.ControlServer = Elsewhere
main()
"""


def test_a_driver_that_its_tasks_cannot_reach_is_named_and_ends_the_run(
    penstock: CommandLine, connection: Connection
) -> None:
    """The epochs went round for ever, with nothing done and two log lines."""
    stage(connection, 1)
    done = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, "run", "--engine", "spark", "--master", "local[2]"],
        cwd=penstock.directory,
        env=penstock.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 3, done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(r"cannot connect to the driver at 127\.0\.0\.1:\d+ .*control\.port=7079", error)
