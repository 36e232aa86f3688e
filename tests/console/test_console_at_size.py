"""The console of a large pipeline: its pages stay small, and a sample takes a few statements."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import psycopg
import pytest
from starlette.testclient import TestClient

from penstock import Log, Pipeline, Queue
from penstock.console import Visitor, make_console
from penstock.console.access import RIGHTS
from penstock.console.status_sampler import TIMEOUTS
from penstock.consuming import make_worker
from penstock.database.connections import Connection
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.operating.status.gathering import StatusReader
from penstock.streaming import Streamer

SHARDS, LETTERS, TENANTS = 1_024, 100_000, 10_000
MAX_BYTES, MAX_STATEMENTS = 100_000, 12

FILL = f"""
INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, reason, attempts)
SELECT 'reads', 'wide', n % {SHARDS}, n, n, 'key-' || n, 'insert', 'thing', '{{}}', clock_timestamp(),
       'Error' || n % 30 || ': something', 1
FROM generate_series(1, {LETTERS}) AS n
"""
STAGE = f"""
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT 'jobs', 0, 'k' || n, 'message', 'thing', '{{}}', jsonb_build_object('tenant', 'tenant-' || n)
FROM generate_series(1, {TENANTS}) AS n
"""
PATHS = (
    "/",
    "/charts",
    "/channels",
    "/channels/wide",
    "/channels/wide/contents",
    "/channels/jobs",
    "/channels/jobs/contents",
    "/channels/jobs/tenants",
    "/consumers",
    "/consumers/reads",
    "/dead-letters",
    "/dead-letters?consumer=reads&error=Error7",
    "/dead-letters/reads/wide/7/7175",
    "/reconciliations",
    "/doctor",
    "/find?q=key-7",
    "/actions",
)


@pytest.mark.slow  # 5 s: 100,000 dead letters, 10,000 tenants
def test_no_page_grows_with_shards_letters_or_tenants(
    connection: Connection, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, jobs = Log("wide", shards=SHARDS), Queue("jobs")
    flow = Pipeline([wide, jobs])

    @flow.consumer(reads=wide, name="reads")
    def _(_session: Any, _records: Any) -> None: ...

    with Streamer(flow, database_url, redis_url) as streamer:
        register_consumer(Store(connection, flow.scope), flow.get_consumer("reads"))
        with make_worker(flow, flow.get_consumer("reads"), database_url, redis_url):
            pass
        connection.execute(STAGE.encode())
        connection.execute(FILL.encode())
        streamer.drain()
    console = make_console(
        flow,
        database_url,
        redis_url,
        access=lambda _: Visitor("ann", frozenset(RIGHTS)),
        acting_database_url=database_url,
    )
    client = TestClient(console, base_url="http://console", headers={"Sec-Fetch-Site": "same-origin"})
    try:
        for path in PATHS:
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert len(answer.content) <= MAX_BYTES, path
    finally:
        console.close()

    statements: list[bytes] = []
    execute: Any = psycopg.Cursor.execute

    def counted(self: Any, query: object, *given: Any, **options: Any) -> Any:
        statements.append(query if isinstance(query, bytes) else str(query).encode())
        return execute(self, query, *given, **options)

    reader = StatusReader(flow, database_url, redis_url, application="console", timeouts=TIMEOUTS)
    try:
        reader.read()
        monkeypatch.setattr(psycopg.Cursor, "execute", counted)
        reader.read()
    finally:
        reader.close()
    reading = [each for each in statements if b"SET " not in each and b"set_config" not in each]
    assert 0 < len(reading) <= MAX_STATEMENTS


def test_all_of_the_console_is_at_most_4_000_lines() -> None:
    """Python, templates, styles and script together."""
    home = Path(str(files("penstock.console")))
    lines = [path.read_text().count("\n") for path in home.rglob("*") if path.suffix in {".py", ".html", ".css", ".js"}]
    assert 3_000 < sum(lines) <= 4_000
