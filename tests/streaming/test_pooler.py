"""A real pooler in transaction mode between Penstock and Postgres: it changes the session with every transaction."""

from collections.abc import Iterator, Sequence

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from fixtures.flow import running, stage_rows
from penstock import Log, Pipeline
from penstock.consuming import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.records import DEFAULT_SCOPE, Record
from penstock.streaming import Streamer
from penstock.streaming.sequencer import Sequencer
from penstock.testing import eventually


@pytest.fixture
def pooled_connection(pooler_url: str) -> Iterator[Connection]:
    with connect_postgres(pooler_url, application="test", prepare=False) as opened:
        pids = {opened.execute("SELECT pg_backend_pid()").fetchone() for _ in range(10)}
        assert len(pids) > 1
        yield opened


def test_records_go_through_two_streamers_and_a_consumer_behind_a_pooler(
    flow: Pipeline, things: Log, connection: Connection, pooler_url: str, redis_url: str
) -> None:
    """Guarantee 18."""
    connection.execute("CREATE TABLE public.seen (id bigint PRIMARY KEY)")

    @flow.consumer(reads=things)
    def reader(session: Session, records: Sequence[Record]) -> None:
        rows = [{"id": record.id} for record in records]
        session.execute(text("INSERT INTO public.seen VALUES (:id)"), rows)

    streamers = [Streamer(flow, pooler_url, redis_url, prepare=False) for _ in range(2)]
    spec = flow.get_consumer("reader")
    worker = LogWorker(flow, spec, pooler_url, redis_url, prepare=False)

    def seen() -> int:
        return len(connection.execute("SELECT id FROM public.seen").fetchall())

    with running(*(streamer.run for streamer in streamers), worker.run):
        for number in range(20):
            stage_rows(connection, things, 25, f"{number} ")
            eventually(lambda n=number: seen() > n * 25, "records flow again")  # type: ignore[misc]
        eventually(lambda: seen() == 500, "all records arrive")


def test_a_sequencer_behind_a_pooler_stops_using_prepared_statements(
    things: Log, connection: Connection, pooled_connection: Connection
) -> None:
    """Guarantee 18: a pooler tracks prepared statements of the protocol at most, never those of SQL."""
    sequencer = Sequencer(pooled_connection, DEFAULT_SCOPE, prepare=True)

    for _ in range(10):
        stage_rows(connection, things, 2)
        assert sequencer.tick().sequenced == 2
        assert sequencer.tick().sequenced == 0
