"""What the pages show works: their Python runs, their commands exist."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from penstock.cli.app import load_commands
from penstock.consuming import LogWorker
from penstock.streaming import Streamer
from penstock.testing import drained, eventually

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?(?:\.venv/bin/)?(penstock .*?)(?:  #.*)?$", re.MULTILINE)
COMMANDS = load_commands()
INLINE = re.compile(r"`(penstock [a-z][^`]*)`")


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(page.read_text()) if kind == language]


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


def test_the_readmes_pipeline_runs(engine: Engine, database_url: str, redis_url: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Ride(Base):
        __tablename__ = "rides"
        id: Mapped[int] = mapped_column(primary_key=True)
        fare: Mapped[int]

    class RideTotal(Base):
        __tablename__ = "ride_totals"
        id: Mapped[int] = mapped_column(primary_key=True)
        fare: Mapped[int]

    Base.metadata.create_all(engine)
    sessions = sessionmaker(engine)
    names: dict[str, Any] = {"Ride": Ride, "RideTotal": RideTotal, "SessionLocal": sessions}
    exec(blocks(ROOT / "README.md", "python")[0], names)
    pipeline = names["pipeline"]

    with sessions.begin() as session:
        session.add_all(Ride(fare=100) for _ in range(10))
    streamer = Streamer(pipeline, database_url, redis_url)
    streamer.drain()
    streamer.close()
    worker = LogWorker(pipeline, pipeline.get_consumer("ride-totals"), database_url, redis_url)

    assert worker.drain() == 10
    worker.close()
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT sum(fare) FROM ride_totals")) == 1000


class Carrier:
    """A service outside Postgres, which is down at first."""

    def __init__(self) -> None:
        self.announced: dict[str, int] = {}

    def announce(self, order: int, *, idempotency_key: str) -> str:
        first = idempotency_key not in self.announced
        self.announced[idempotency_key] = order
        if first:
            raise ConnectionError
        return f"parcel {order}"


def test_the_handlers_of_the_how_to_apply_what_is_staged(
    engine: Engine, database_url: str, redis_url: str
) -> None:
    """Those that need no Spark, over records of every action."""
    page = ROOT / "docs" / "how-to" / "write-a-handler.md"
    names: dict[str, Any] = {"carrier": Carrier()}
    for block in blocks(page, "python"):
        exec(block.replace("after=30", "after=0.01"), names)
    pipeline, order = names["pipeline"], names["Order"]
    names["Base"].metadata.create_all(engine)
    sessions = sessionmaker(engine)
    pipeline.attach(sessions)

    with sessions.begin() as session:
        for customer in ("ann", "bob"):
            session.add(names["CustomerTotal"](customer=customer, cents=0))
            session.add(names["CustomerSum"](customer=customer, cents=0))
        for n in range(4):
            session.add(order(customer=("ann", "bob")[n % 2], cents=n * 50_000))
    with sessions.begin() as session:
        session.delete(session.get_one(order, 4))
    consumers = set(pipeline.consumers) - {"orders-by-customer"}
    drained(pipeline, database_url, redis_url, consumers=consumers)

    with engine.connect() as connection:

        def rows(query: str) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in connection.execute(text(query))]

        assert rows("SELECT cents FROM receipts ORDER BY 1") == [(0,), (50_000,), (100_000,)]
        assert rows("SELECT action, count(*) FROM changes GROUP BY 1 ORDER BY 1") == [
            ("delete", 1),
            ("insert", 4),
        ]
        assert rows("SELECT count(*), sum(cents) FROM arrivals") == [(5, 450_000)]
        assert rows("SELECT sum(cents) FROM invoices") == [(300_000,)]
        assert rows("SELECT words FROM indexed_orders ORDER BY 1") == [
            ("ann 0",),
            ("ann 100000",),
            ("bob 50000",),
        ]
        assert rows("SELECT customer FROM large_orders ORDER BY 1") == [("ann",), ("bob",)]
        for table in ("customer_totals", "customer_sums"):
            query = f"SELECT customer, cents FROM {table} ORDER BY 1"
            assert rows(query) == [("ann", 100_000), ("bob", 200_000)]
        assert rows("SELECT customer FROM first_orders ORDER BY 1") == [("ann",), ("bob",)]
        assert rows("SELECT count(*) FROM shipments") == [(4,)]


def test_the_tutorial_ends_as_it_says(tmp_path: Path) -> None:
    """Its two programs and its kill -9, in an empty directory."""
    shop, orders = blocks(ROOT / "docs" / "tutorial" / "first-pipeline.md", "python")
    (tmp_path / "shop.py").write_text(shop)
    (tmp_path / "orders.py").write_text(orders)
    penstock = str(Path(sys.executable).parent / "penstock")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [penstock, "run", "--app", "shop:pipeline", "--engine", "inline"],
            cwd=tmp_path,
            env=environment,
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


def _answer(ask: Callable[[], int]) -> int | None:
    """What was asked for; None while the server is starting, and before it has written where it is."""
    try:
        return ask()
    except (psycopg.OperationalError, FileNotFoundError):
        return None
