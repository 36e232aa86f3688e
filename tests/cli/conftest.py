"""The command line as users have it: a process of its own, in a directory with an application."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PENSTOCK = Path(sys.executable).with_name("penstock")

APPLICATION = """
import time
from sqlalchemy import text
from penstock import Log, Pipeline

things = Log("things", shards=2)
pipeline = Pipeline([things])
nothing = 1

@pipeline.consumer(reads=things, attempts=1)
def reader(session, records):
    for record in records:
        if record.data.get("bad"):
            raise ValueError("bad")
        if record.data.get("slow"):
            time.sleep(60)
        session.execute(text("INSERT INTO public.effects VALUES (:id)"), {"id": record.id})
"""

# Starting Python and importing what a command needs takes longer than most commands: one process does it once, and each
# command is a fork of it.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "penstock.cli.app",
        "pydantic_settings",
        "structlog",
        "rich.table",
        "psycopg",
        "redis",
        "penstock.operating.doctor",
    ]
)


def _be_penstock(directory: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    """What a forked process does: it becomes the command."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["penstock", *arguments]
    from penstock.cli.app import main  # noqa: PLC0415  in the fork

    main()


class CommandLine:
    """Runs ``penstock`` in a directory that holds ``shop.py``."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.directory = directory
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")
        } | variables
        (directory / "shop.py").write_text(APPLICATION)

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        process = _forks.Process(
            target=_be_penstock, args=(self.directory, arguments, self.environment | variables)
        )
        process.start()
        process.join(150)
        assert process.exitcode is not None, f"penstock {' '.join(arguments)} does not end"
        out, err = ((self.directory / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, process.exitcode, out, err)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts the installed command."""
        return subprocess.Popen(
            [PENSTOCK, *arguments],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, redis_url: str) -> CommandLine:
    """With URLs and an application."""
    return CommandLine(
        tmp_path,
        PENSTOCK_DATABASE_URL=database_url,
        PENSTOCK_REDIS_URL=redis_url,
        PENSTOCK_APP="shop:pipeline",
    )


@pytest.fixture
def bare(tmp_path: Path) -> CommandLine:
    """With nothing but the application's file."""
    return CommandLine(tmp_path)


Started = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def started(penstock: CommandLine) -> Iterator[Started]:
    """Starts commands, and ends those that are left."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        processes.append(penstock.start(*arguments))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
