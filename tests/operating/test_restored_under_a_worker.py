"""Postgres is restored while a worker works: nothing that was lost takes effect afterwards, also where a retry reconnects."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.damage import copy_data, restore_data
from fixtures.flow import Site
from fixtures.keeping_pooler import KeepingPooler
from fixtures.restored import stage, stream
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import connect_postgres
from penstock.embedded import EmbeddedPostgres
from penstock.errors import HistoryDiverged, ServerUnavailable
from penstock.records import Record
from penstock.streaming import Streamer


@pytest.fixture(autouse=True)
def _effects(server: EmbeddedPostgres) -> None:
    with connect_postgres(server.url, application="test") as connection:
        connection.execute("CREATE TABLE public.effects (key text)")


def drain_again_and_again(worker: LogWorker) -> None:
    for _ in range(3):
        worker.drain()


@pytest.mark.slow
def test_a_handler_under_which_postgres_is_restored_is_not_retried_with_lost_records(
    flow: Pipeline, things: Log, server: EmbeddedPostgres, redis_url: str, tmp_path: Path
) -> None:
    """Guarantee 10: the retry would find the checkpoint right before them."""
    calls = 0

    @flow.consumer(reads=things, name="reader")
    def reader(session: Session, records: Sequence[Record]) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            restore_data(server, tmp_path / "older")
        for record in records:
            session.execute(text("INSERT INTO public.effects VALUES (:key)"), {"key": record.key})

    spec = flow.get_consumer("reader")
    stage(server.url, things, 1, "kept")
    stream(flow, server.url, redis_url)
    with LogWorker(WorkerSetup(flow, spec, server.url, redis_url)) as worker:
        worker.drain()
    copy_data(server, tmp_path / "older")
    stage(server.url, things, 1, "lost")
    stream(flow, server.url, redis_url)

    with LogWorker(WorkerSetup(flow, spec, server.url, redis_url)) as worker:
        with pytest.raises(ServerUnavailable, match="compared"):
            worker.drain()
        worker.close()
        with pytest.raises(HistoryDiverged, match="the log goes to offset"):
            worker.round(block_ms=0)

    assert calls == 2
    with connect_postgres(server.url, application="test") as connection:
        effects = connection.execute("SELECT key FROM public.effects").fetchall()
    assert [key[:4] for (key,) in effects] == ["kept"]


@pytest.fixture
def pooled_url(server: EmbeddedPostgres) -> Iterator[str]:
    """URL of the server behind a pooler that keeps its clients' connections."""
    known: dict[str, Any] = conninfo_to_dict(server.url)
    with KeepingPooler(Path(known["host"]) / f".s.PGSQL.{known['port']}") as pooler:
        yield server.url.replace(known["host"], str(pooler.directory))


@pytest.mark.slow
def test_a_streamer_whose_connection_survives_a_restore_compares_again(
    site: Site, server: EmbeddedPostgres, pooled_url: str, tmp_path: Path
) -> None:
    """Guarantee 10: another one has ticked, so that the journal is longer than the log, and only differs."""
    stage(server.url, site.things, 10, "kept")
    stream(site.flow, server.url, site.redis_url)
    copy_data(server, tmp_path / "older")
    stage(server.url, site.things, 10, "lost")
    streamers = [Streamer(site.flow, pooled_url, site.redis_url, prepare=False) for _ in range(2)]
    for each in streamers:
        each.drain()
    restore_data(server, tmp_path / "older")
    stage(server.url, site.things, 100, "new")

    for each in streamers:
        with pytest.raises(ServerUnavailable, match="compared"):
            each.stream()
    keys = [record.key for records in site.log().values() for record in records]
    assert not [key for key in keys if key.startswith("new")]
    for each in streamers:
        each.close()
        with pytest.raises(HistoryDiverged):
            each.round()
        each.close()


@pytest.mark.slow
def test_a_consumer_whose_connection_survives_a_restore_applies_nothing_that_was_lost(
    flow: Pipeline, things: Log, server: EmbeddedPostgres, pooled_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Guarantee 10: its checkpoint went back, and the log has what follows it."""

    @flow.consumer(reads=things, name="reader")
    def reader(session: Session, records: Sequence[Record]) -> None:
        rows = [{"key": record.key} for record in records]
        session.execute(text("INSERT INTO public.effects VALUES (:key)"), rows)

    spec = flow.get_consumer("reader")
    stage(server.url, things, 10, "kept")
    stream(flow, server.url, redis_url)
    with LogWorker(WorkerSetup(flow, spec, server.url, redis_url)) as worker:
        worker.drain()
    copy_data(server, tmp_path / "older")
    stage(server.url, things, 10, "lost")
    stream(flow, server.url, redis_url)
    with LogWorker(WorkerSetup(flow, spec, pooled_url, redis_url, prepare=False)) as worker:
        assert worker.drain() == 10
        restore_data(server, tmp_path / "older")

        with pytest.raises(ServerUnavailable, match="compared"):
            drain_again_and_again(worker)
        worker.close()
        with pytest.raises(HistoryDiverged):
            worker.round(block_ms=0)

    with connect_postgres(server.url, application="test") as connection:
        effects = connection.execute("SELECT key FROM public.effects").fetchall()
    assert {key[:4] for (key,) in effects} == {"kept"}
