"""The page of workers: processes with their releases, connections and jobs."""

import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from markupsafe import escape

from console.conftest import As
from fixtures.constants import SetConstants
from penstock import Job, Pipeline, Queue
from penstock.consuming import make_worker
from penstock.database.connections import Connection, connect_postgres
from penstock.display import find_process, find_release
from penstock.operating.worker_sessions import ProcessSession, list_processes
from penstock.streaming import Streamer
from penstock.testing import eventually

CALLS = Queue("calls", shards=2)

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'calls', n % 2, 'tenant-' || n, 'call', 'partner', '{}' FROM generate_series(1, 3) n
"""


class Calls:
    """A handler without a session, which works until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def handle(self, _: Job) -> None:
        self.begun.release()
        self.go.wait(60)


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.go.set()


@pytest.fixture
def flow(calls: Calls) -> Pipeline:
    made = Pipeline([CALLS])

    @made.worker(reads=CALLS, name="sends", concurrency=8)
    def _(job: Job) -> None:
        calls.handle(job)

    return made


def test_a_mix_of_releases_is_shown_on_the_page_of_workers(
    see_as: As, database_url: str, set_constants: SetConstants
) -> None:
    """Whatever a session writes into its name, it is shown as text."""
    client, hostile = see_as("see"), "<img src=x onerror=steal()>\"'"
    set_constants("console.reading", REMEMBERED_S=0.0)
    before = client.get("/workers").text
    with (
        connect_postgres(database_url, application="consumer applies"),
        psycopg.connect(database_url, application_name="penstock consumer refuses"),
        psycopg.connect(database_url, application_name=f"penstock streamer/{hostile}"),
    ):
        page, rows = client.get("/workers").text, client.get("/workers.json").json()["processes"]

    assert "Several releases run" not in before
    assert re.search(rf"Several releases run: .*{find_release()} \(\d+ connections?\).*unknown \(1 connection\)", page)
    assert "<img src=x" not in page
    assert f"<td>{escape(hostile)}</td>" in page
    shown = {(row["application"], row["release"]) for row in rows}
    assert shown >= {
        ("penstock consumer applies", find_release()),
        ("penstock consumer refuses", None),
        ("penstock streamer", hostile),
    }


def test_a_worker_has_its_busy_connections_and_when_it_was_last_heard_from(see_as: As, database_url: str) -> None:
    client, worker = see_as("see"), "consumer applies"
    with (
        connect_postgres(database_url, application=worker) as busy,
        connect_postgres(database_url, application=worker),
        connect_postgres(database_url, application="metrics"),
        busy.transaction(),
    ):
        busy.execute("SELECT 1")
        text = client.get("/workers").text

    page = re.findall(
        r'<th scope="row">(?:<a [^>]*>)?([\w ]+)(?:</a>)?</th><td>(.*?)</td><td>([^ ]*?)(?: <small>.*?)?</td><td><time.*?</td>'
        r'<td class="n">(\d+)</td><td class="n">(.+?)</td><td class="n">(.+?)</td><td>(<time)',
        text,
    )
    ours = find_release(), find_process()
    assert {("applies", *ours, "2", "1", "-", "<time"), ("metrics", *ours, "1", "0", "-", "<time")} <= {*page}


def test_slots_whose_handlers_take_no_session_show_by_the_jobs_of_their_process(
    see_as: As,
    flow: Pipeline,
    calls: Calls,
    connection: Connection,
    streamer: Streamer,
    database_url: str,
    redis_url: str,
    set_constants: SetConstants,
) -> None:
    """They hold no connection while they work."""
    set_constants("console.reading", REMEMBERED_S=0.0)
    set_constants("console.status_sampler", WATCHED_S=0.1)
    client, stopping = see_as("see"), threading.Event()
    worker = make_worker(flow, flow.get_consumer("sends"), database_url, redis_url)
    thread = threading.Thread(target=worker.run, args=(stopping.is_set,))
    thread.start()

    def shown() -> list[tuple[Any, ...]]:
        processes = client.get("/workers.json").json()["processes"]
        names = ("release", "process", "busy", "jobs", "busy_slots", "slots")
        return [tuple(row[name] for name in names) for row in processes if row["application"].endswith("sends")]

    ours = find_release(), find_process(), 0
    try:
        connection.execute(STAGE.encode())
        streamer.drain()
        for _ in range(3):
            assert calls.begun.acquire(timeout=60)
        eventually(lambda: shown() == [(*ours, 3, 3, 8)], "three jobs of one process, and no busy connection")
        page = client.get("/workers").text
        calls.go.set()
        eventually(lambda: shown() == [(*ours, None, None, None)], "none is left")
    finally:
        calls.go.set()
        stopping.set()
        thread.join()
        worker.close()
    assert re.search(
        rf"sends</a></th>.*<td>{find_process()}.*<td class=\"n\">3 <small>3 of 8 slots busy</small></td><td><time", page
    )


NOW = datetime(2026, 11, 30, tzinfo=UTC)


def make_session(process: str | None, state: str | None = "idle", second: int = 0) -> ProcessSession:
    since = NOW.replace(second=second)
    return ProcessSession("penstock consumer sends", "0.1.0", process, second, "u", "10.0.0.3", since, state, since)


HEX = "0123456789ab"
TWO = [make_session("web-1:7", second=9), make_session("web-1:8", "active", 2), make_session("web-1:7", None, 1)]


@pytest.mark.parametrize(
    ("sessions", "leases", "processes"),
    [
        (TWO, {}, [("web-1:7", 2, None, 1, 9, None), ("web-1:8", 1, 1, 2, 2, None)]),
        (
            TWO,
            {f"sends@web-1:8/4-{HEX}": 2, f"sends@web-1:8/2-{HEX[::-1]}": 3, f"other@web-1:7-{HEX}": 1},
            [("web-1:7", 2, None, 1, 9, None), ("web-1:8", 1, 1, 2, 2, (5, 4, 6)), ("web-1:7", 0, 0, None, None, 1)],
        ),
        # Its name in Postgres is cut.
        ([make_session("5d-x2x7q:1")], {f"sends@web-7d9f8b6c5d-x2x7q:1-{HEX}": 4}, [("5d-x2x7q:1", 1, 0, 0, 0, 4)]),
        # A release that did not name its process, in Postgres or in Redis.
        ([make_session(None)], {f"sends-{HEX}": 4}, [(None, 1, 0, 0, 0, None), (None, 0, 0, None, None, 4)]),
        ([], {"a reader of another program": 1}, []),
    ],
)
def test_processes_of_one_host_are_told_apart_and_have_their_own_jobs(
    sessions: list[ProcessSession], leases: dict[str, int], processes: list[tuple[Any, ...]]
) -> None:
    listed = list_processes(sessions, leases)

    assert [
        (
            row.process,
            row.connections,
            row.busy,
            row.since and row.since.second,
            row.heard_at and row.heard_at.second,
            row.jobs if row.slots is None else (row.jobs, row.busy_slots, row.slots),
        )
        for row in listed
    ] == processes
