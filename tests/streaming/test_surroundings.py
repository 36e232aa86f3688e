"""A streamer and a consumer with standbys, poolers, wrong clocks, one hot key, and a large backlog."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.damage import copy_data, restore_data
from fixtures.flow import OpenWorker, Publish, ReadLog, retain_now, stage_rows
from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.embedded import EmbeddedPostgres
from penstock.errors import ReadOnlyPostgres
from penstock.records import Record
from penstock.schema.initialise import initialise
from penstock.streaming import Streamer


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A standby, which takes no writes."""
    primary = EmbeddedPostgres(tmp_path / "primary")
    primary.start()
    initialise(primary.url)
    primary.stop()
    copy_data(primary, tmp_path / "copy")
    primary.remove()
    (tmp_path / "copy" / "standby.signal").touch()
    server = EmbeddedPostgres(tmp_path / "standby")
    server.start()
    server.stop()
    restore_data(server, tmp_path / "copy")
    server.start()
    yield server
    server.remove()


@pytest.mark.slow
def test_a_standby_is_refused(standby: EmbeddedPostgres, flow: Pipeline, redis_url: str) -> None:
    """Guarantee 11."""
    streamer = Streamer(flow, standby.url, redis_url)

    with pytest.raises(ReadOnlyPostgres, match="a standby"):
        streamer.round()
    streamer.close()


def test_a_read_only_server_is_refused(streamer: Streamer, connection: Connection) -> None:
    """Guarantee 11."""
    connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET default_transaction_read_only = on'.encode())

    with pytest.raises(ReadOnlyPostgres, match="default_transaction_read_only"):
        streamer.round()


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Every transaction of SQLAlchemy gets a session without state, as behind a pooler."""

    def forget(connection: Any) -> None:
        driver = connection.connection.driver_connection
        driver.rollback()
        driver.autocommit = True
        driver.execute("DISCARD ALL")
        driver.autocommit = False

    event.listen(Engine, "begin", forget)
    yield
    event.remove(Engine, "begin", forget)


@pytest.mark.usefixtures("forgetful")
def test_nothing_depends_on_the_state_of_a_session(
    open_worker: OpenWorker, flow: Pipeline, things: Log, connection: Connection, database_url: str, redis_url: str
) -> None:
    """Guarantee 18: a pooler in transaction mode may use another session each time."""
    applied: list[int] = []

    @flow.consumer(reads=things)
    def reader(_session: Session, records: Sequence[Record]) -> None:
        applied.extend(record.id for record in records)

    streamer = Streamer(flow, database_url, redis_url, prepare=False)
    worker = open_worker(prepare=False)
    for number in range(10):
        stage_rows(connection, things, 20, f"{number} ")
        streamer.round()
        psycopg.Cursor(streamer.opened().store.connection).execute("DISCARD ALL")
    streamer.drain()
    worker.drain()

    prepared = streamer.opened().store.connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
    streamer.close()
    worker.close()
    assert prepared == (0,)
    assert sorted(applied) == list(range(1, 201))


def test_wrong_clocks_change_neither_order_nor_number(
    flow: Pipeline, things: Log, streamer: Streamer, connection: Connection, logged: ReadLog, open_worker: OpenWorker
) -> None:
    """Guarantee 20: the times of records are displayed, and decide nothing."""
    applied: list[Record] = []

    @flow.consumer(reads=things)
    def reader(_session: Session, records: Sequence[Record]) -> None:
        applied.extend(records)

    for years in ((2090, 1990), (2024, 1970)):
        for year in years:
            connection.execute(
                "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, created_at) "
                "SELECT 'things', 0, 'k', 'update', 'thing', '{}', make_date(%s, 1, 1) FROM generate_series(1, 50)",
                (year,),
            )
        streamer.round()
    retain_now(streamer)
    streamer.drain()
    in_log = [record.id for record in logged(things)[things.shard_names[0]]]
    open_worker().drain()

    assert in_log == list(range(1, 201))
    assert [record.id for record in applied] == in_log


def test_a_hot_key_holds_up_only_its_own_shard(
    streamer: Streamer, connection: Connection, things: Log, logged: ReadLog, set_constants: SetConstants
) -> None:
    """Guarantee 24: every round, however short, sends a batch of every shard."""
    set_constants("streaming.publisher", ROUND_S=0.0)
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', CASE WHEN i <= 20000 THEN 0 ELSE 1 END, 'k', 'update', 'thing', '{}' "
        "FROM generate_series(1, 20010) AS i"
    )

    streamer.round()

    hot, other = (len(logged(things)[shard]) for shard in things.shard_names)
    assert other == 10
    assert hot < 20000


def test_a_consumer_that_is_far_behind_reads_one_batch_at_a_time(
    flow: Pipeline, things: Log, publish: Publish, open_worker: OpenWorker
) -> None:
    """Guarantee 25: the backlog is in the log, not in memory."""
    sizes: list[int] = []

    @flow.consumer(reads=things, batch=100)
    def reader(session: Session, records: Sequence[Record]) -> None:
        sizes.append(len(records))
        session.execute(text("SELECT 1"))

    publish(5000)
    worker = open_worker()
    first = worker.round(block_ms=0)

    assert first.applied == 200
    assert worker.drain() == 4800
    assert max(sizes) == 100
    worker.close()
