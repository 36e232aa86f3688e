"""Reconcile on Spark of tables that are larger than its memory: it spills to files, and stays exact."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from fixtures.command_line import CommandLine, Started
from penstock.database.connections import Connection

SHOP = """
from penstock import Log, Pipeline

pipeline = Pipeline([things := Log("things", shards=2)])

@pipeline.consumer(reads=things)
def copies(session, records): ...

@pipeline.reconciliation(of=copies, state="public.copies", key="id")
def canonical(tables):
    return tables("public.canonical")
"""

CANONICAL = """
CREATE UNLOGGED TABLE public.canonical AS
SELECT i AS id, (i %% 100000)::int AS account, i * 0.01 AS amount, timestamptz '2026-01-01' + i * interval '1 second' AS at,
       md5(i::text) AS note, repeat(md5((-i)::text), %(times)s) AS text
FROM generate_series(1, %(rows)s::bigint) i
"""

# Of the differing rows, 200 have another amount, 200 another amount and no note, 200 are missing, and 200 are surplus.
COPIES = """
CREATE UNLOGGED TABLE public.copies AS
SELECT id, account, amount + CASE WHEN id %% %(every)s IN (1, 2) THEN 0.01 ELSE 0 END AS amount, at,
       CASE WHEN id %% %(every)s <> 2 THEN note END AS note, text
FROM public.canonical
WHERE id %% %(every)s <> 3
UNION ALL
SELECT -id, 0, 0, now(), '', '' FROM public.canonical WHERE id <= 200
"""

KEYS = (
    "ALTER TABLE public.canonical ADD PRIMARY KEY (id)",
    "ALTER TABLE public.copies ADD PRIMARY KEY (id)",
    "ANALYZE public.canonical, public.copies",
)

APART = """
SELECT count(*)
FROM public.canonical c
FULL JOIN public.copies s USING (id)
WHERE (c.amount, c.note, c.text) IS DISTINCT FROM (s.amount, s.note, s.text)
"""


def create_tables(connection: Connection, rows: int, times: int) -> int:
    """Makes both tables; returns their size in bytes."""
    options = {"rows": rows, "times": times, "every": rows // 200}
    for statement in (CANONICAL, COPIES):
        connection.execute(statement, options)
    for statement in KEYS:
        connection.execute(statement.encode())
    [(size,)] = connection.execute(
        "SELECT pg_table_size('public.canonical') + pg_table_size('public.copies')"
    ).fetchall()
    return int(size)


@dataclass
class Memory:
    """The most memory that processes had, in bytes, by the name of their program."""

    most: dict[str, int] = field(default_factory=dict)

    def look(self, process: int) -> None:
        """Adds up what the descendants of a process have now."""
        now: dict[str, int] = {}
        for pid in _descendants(process):
            try:
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, ProcessLookupError):
                continue
            now[name] = now.get(name, 0) + 4096 * pages
        for name, size in now.items():
            self.most[name] = max(self.most.get(name, 0), size)


def _descendants(process: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return
    threads = Path(f"/proc/{process}/task")
    try:
        for thread in threads.iterdir():
            if thread.name != str(process):
                children += (thread / "children").read_text().split()
    except OSError:
        pass
    for child in map(int, children):
        yield child
        yield from _descendants(child)


@contextmanager
def watched(process: int) -> Iterator[Memory]:
    """Looks at the memory of the descendants of a process, ten times a second."""
    memory, ended = Memory(), threading.Event()

    def look() -> None:
        while not ended.wait(0.1):
            memory.look(process)

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    try:
        yield memory
    finally:
        ended.set()
        watching.join()


def count_spilled(events: Path) -> int:
    """Bytes that tasks have spilled to files, by Spark's log of events."""
    lines = (line for file in events.rglob("events_*") for line in file.read_text().splitlines())
    ended = (json.loads(line) for line in lines if '"SparkListenerTaskEnd"' in line)
    return sum(each.get("Task Metrics", {}).get("Disk Bytes Spilled", 0) for each in ended)


@pytest.fixture
def shop(penstock: CommandLine) -> CommandLine:
    """An application whose consumer has started."""
    (penstock.directory / "shop.py").write_text(SHOP)
    assert penstock("init").returncode == 0
    assert penstock("stream", "--drain").returncode == 0
    assert penstock("consume", "copies", "--drain").returncode == 0
    return penstock


@pytest.mark.spark
@pytest.mark.storm
@pytest.mark.timeout(240)
def test_what_does_not_fit_into_memory_is_spilled(shop: CommandLine, connection: Connection) -> None:
    """Guarantee 28."""
    size = create_tables(connection, 200_000, 4)
    events = shop.directory / "events"
    events.mkdir()
    # 20 MB for what tasks sort, of a heap of 512 MB, most of which Spark keeps for itself.
    small = {
        "spark.driver.memory": "512m",
        "spark.memory.fraction": "0.1",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": events.as_uri(),
        "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "2",
    }
    conf = [part for name, value in small.items() for part in ("--conf", f"{name}={value}")]

    done = shop("reconcile", "copies", "--json", "--engine", "spark", *conf)

    assert done.returncode == 4, done.stderr
    _check(json.loads(done.stdout)[0], 200_000)
    assert size > 80_000_000
    assert count_spilled(events) > 10_000_000


@pytest.mark.spark
@pytest.mark.storm
@pytest.mark.timeout(3600)
def test_twenty_million_rows_in_one_and_a_half_gigabytes(
    shop: CommandLine, started: Started, connection: Connection, record_property: Callable[[str, object], None]
) -> None:
    """Guarantee 28: every difference, and nothing else, is found and repaired."""
    rows = 20_000_000
    size = create_tables(connection, rows, 2)
    memory = ("--conf", "spark.driver.memory=1500m", "--master", "local[2,4]")

    began = monotonic()
    run = started("reconcile", "copies", "--apply", "--json", *memory)
    with watched(run.pid) as most:
        out, err = run.communicate()
    record_property("both tables, in GB", round(size / 1e9, 1))
    record_property("seconds", round(monotonic() - began))
    for name, peak in most.most.items():
        record_property(f"memory of {name}, in MB", round(peak / 1e6))

    assert (run.returncode, "Traceback" in err) == (0, False), err
    found = json.loads(out)[0]
    _check(found, rows)
    assert found["repaired"] == 800
    assert connection.execute(APART.encode()).fetchall() == [(0,)]


def _check(found: dict[str, Any], rows: int) -> None:
    assert found["compared"] == rows + 200
    assert found["differences"] == {"missing": 200, "surplus": 200, "different": 400}
    assert found["columns"] == {"amount": 400, "note": 200}
    assert [json.loads(each["key"])["id"] for each in found["keys"][:3]] == [-200, -199, -198]
