"""The tutorial ends as it says: its two programs, its commands and its kill -9, in an empty directory."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from documents.conftest import is_printed
from fixtures.command_line import PENSTOCK, CommandLine
from fixtures.documents import DOCS, Command, blocks, commands
from penstock.cli.connecting import running_servers
from penstock.database.connections import Connection
from penstock.testing import eventually

PAGE = DOCS / "tutorial" / "first-pipeline.md"


@pytest.mark.slow
@pytest.mark.page
def test_the_tutorial_ends_as_it_says(tmp_path: Path) -> None:
    """It takes some seconds: its pipeline starts servers of its own, twice."""
    penstock = CommandLine(tmp_path)
    shop, orders = blocks(PAGE, "python")
    (tmp_path / "shop.py").write_text(shop)
    (tmp_path / "orders.py").write_text(orders)
    run, status, tail, show = commands(PAGE)
    keyboard, terminal = pty.openpty()  # without one, no servers are started

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [PENSTOCK, *run.line.split()[1:]],
            cwd=tmp_path,
            env=penstock.environment,
            stdin=terminal,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def revenue(url: str) -> int:
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT cents FROM revenue").fetchone()
        return int(row[0]) if row else 0

    def check_printed(command: Command, printed: str) -> None:
        assert [line for line in command.printed if not is_printed(line, printed)] == [], printed

    first = start()
    written = tmp_path / ".penstock" / "postgres" / "url"
    eventually(
        lambda: written.exists() and (tmp_path / ".penstock" / "redis" / "url").exists(),
        "the servers run",
        timeout_s=180,
    )
    subprocess.run([sys.executable, "orders.py"], cwd=tmp_path, check=True)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = start()
    try:
        eventually(
            lambda: _answer(lambda: revenue(written.read_text().strip())) == 100_000, "100,000 cents", timeout_s=180
        )
        # The first run may have applied everything: then the second has started no more than its Postgres.
        eventually(lambda: running_servers(tmp_path / ".penstock"), "the servers run again", timeout_s=180)
        for command in (status, tail):
            done = penstock(*command.line.partition(" | ")[0].split()[1:])
            assert done.returncode == 0, done.stderr
            check_printed(command, done.stdout)
        program = show.line.removeprefix("python -c '").removesuffix("'")
        shown = [sys.executable, "-c", program]
        check_printed(show, subprocess.check_output(shown, cwd=tmp_path, text=True))
    finally:
        second.send_signal(signal.SIGTERM)
        second.wait(60)
        os.close(keyboard)
        os.close(terminal)


def write_program(penstock: CommandLine, tutorial: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a tutorial's program where the tests' servers stand for its own; returns the page."""
    page = DOCS / "tutorial" / tutorial
    penstock.environment["PENSTOCK_APP"] = f"{name}:pipeline"
    (penstock.directory / f"{name}.py").write_text("\n".join(blocks(page, "python")))
    url = penstock.directory / ".penstock" / "postgres" / "url"
    url.parent.mkdir(parents=True)
    url.write_text(penstock.environment["PENSTOCK_DATABASE_URL"])
    monkeypatch.chdir(penstock.directory)
    return page


@pytest.mark.slow
@pytest.mark.page
def test_the_copy_of_the_third_tutorial_ends_as_it_says(
    penstock: CommandLine, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise."""
    page = write_program(penstock, "a-copy-that-is-right.md", "copies", monkeypatch)
    run, _, equal, change, differs, repair, again = commands(page)
    worker = penstock.begin(*run.line.split()[1:])
    subprocess.run([sys.executable, "copies.py"], check=True)
    copied = "SELECT count(*), min(fare) FROM ride_copies"
    eventually(lambda: connection.execute(copied).fetchall() == [(999, 1)], "all is copied", timeout_s=60)
    for command, status in ((equal, 0), (differs, 4), (repair, 0), (again, 0)):
        if command is differs:
            program = change.line.removeprefix("python -c '").removesuffix("'")
            subprocess.run([sys.executable, "-c", program], check=True)
        done = penstock(*command.line.split()[1:])
        printed = done.stdout + done.stderr
        assert done.returncode == status, printed
        assert [line for line in command.printed if not is_printed(line, printed)] == [], printed
    worker.terminate()
    penstock.wait(worker)


@pytest.mark.slow
@pytest.mark.page
def test_the_queue_of_the_second_tutorial_ends_as_it_says(
    penstock: CommandLine, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the servers of the tests, whose URL is where the tutorial's own would be.  Six commands take some seconds."""
    page = write_program(penstock, "a-queue-of-jobs.md", "jobs", monkeypatch)
    run, _, status, shown, listed, retried = commands(page)
    # Whether a streamer starts before a full hour or after it decides whether the schedule has had a job: not in this test.
    worker = penstock.begin(*run.line.split()[1:])
    subprocess.run([sys.executable, "jobs.py"], check=True)

    def is_done() -> bool:
        rows = connection.execute("SELECT count(*) FROM penstock.staged_records WHERE action <> 'scheduled'").fetchall()
        return rows == [(0,)]

    eventually(is_done, "all jobs have ended", timeout_s=60)
    for command in (status, listed):
        done = penstock(*command.line.split()[1:])
        assert done.returncode == 0, done.stderr
        assert [line for line in command.printed if not is_printed(line, done.stdout)] == [], done.stdout
    program = shown.line.removeprefix("python -c '").removesuffix("'")
    assert subprocess.check_output([sys.executable, "-c", program], text=True).splitlines() == list(shown.printed)
    assert penstock(*retried.line.split()[1:]).returncode == 0
    eventually(
        lambda: "no such address" in penstock(*listed.line.split()[1:]).stdout, "it has failed again", timeout_s=60
    )
    worker.terminate()
    penstock.wait(worker)


def _answer(ask: Callable[[], int]) -> int | None:
    """What was asked for; None while the server is starting, and before it has written where it is."""
    try:
        return ask()
    except (psycopg.OperationalError, FileNotFoundError):
        return None
