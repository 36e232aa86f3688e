"""What the pages show works: their Python runs, their commands exist."""

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from fixtures.documents import DOCS, ROOT, blocks
from penstock.cli.app import load_commands
from penstock.testing import eventually

PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
COMMAND = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?(penstock .*?)(?:  #.*)?$", re.MULTILINE)
COMMANDS = load_commands()
INLINE = re.compile(r"`(penstock [a-z][^`]*)`")


PYTHON = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]


@pytest.mark.parametrize(
    ("page", "number"), PYTHON, ids=lambda value: getattr(value, "stem", str(value))
)
def test_python_in_a_page_is_python(page: Path, number: int) -> None:
    compile(blocks(page, "python")[number], f"{page.name}, block {number + 1}", "exec")


def commands(page: Path) -> Iterator[str]:
    for block in blocks(page, "console"):
        yield from COMMAND.findall(block)
    yield from INLINE.findall(page.read_text())


def unknown(command: str) -> str | None:
    """What of a command line the program does not know; None if it knows all of it."""
    words = shlex.split(
        command.split("|", maxsplit=1)[0].split(">", maxsplit=1)[0].replace("…", "")
    )[1:]
    found, options = COMMANDS, {"--help", "--version"}
    while found and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in found:
            return name
        options |= {option for p in found[name].params for option in (*p.opts, *p.secondary_opts)}
        found = getattr(found[name], "commands", {})
    return next((w for w in words if w.startswith("--") and w.split("=")[0] not in options), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_a_page_exist(page: Path) -> None:
    assert [command for command in commands(page) if unknown(command)] == []


def test_the_tutorial_ends_as_it_says(tmp_path: Path) -> None:
    """Its two programs and its kill -9, in an empty directory, at a terminal."""
    shop, orders = blocks(DOCS / "tutorial" / "first-pipeline.md", "python")
    (tmp_path / "shop.py").write_text(shop)
    (tmp_path / "orders.py").write_text(orders)
    penstock = str(Path(sys.executable).parent / "penstock")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    keyboard, terminal = pty.openpty()

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [penstock, "run", "--app", "shop:pipeline", "--engine", "inline"],
            cwd=tmp_path,
            env=environment,
            stdin=terminal,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def revenue(url: str) -> int:
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT cents FROM revenue").fetchone()
        return int(row[0]) if row else 0

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
            lambda: _answer(lambda: revenue(written.read_text().strip())) == 100_000,
            "100,000 cents",
            timeout_s=180,
        )
    finally:
        second.send_signal(signal.SIGTERM)
        second.wait(20)
        os.close(keyboard)
        os.close(terminal)


def _answer(ask: Callable[[], int]) -> int | None:
    """What was asked for; None while the server is starting, and before it has written where it is."""
    try:
        return ask()
    except (psycopg.OperationalError, FileNotFoundError):
        return None
