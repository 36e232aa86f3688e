"""Settings of the database that change how values are written do not change a record."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from redis import Redis
from sqlalchemy import Engine, Interval, Numeric, create_engine, text, types
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fixtures.formats import set_unusual
from fixtures.postgres import engine_url
from penstock import Log, Pipeline, stage
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import connect_postgres
from penstock.database.registry import registered_channels
from penstock.database.store import Store
from penstock.embedded import EmbeddedPostgres
from penstock.errors import UnsafeSetting
from penstock.operating import letters as dead_letters
from penstock.operating.consumers import list_consumers
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.status.gathering import status
from penstock.reconciling.reconciliation import last_runs
from penstock.records import Record
from penstock.schema.initialise import initialise
from penstock.staging.triggers import make_trigger
from penstock.streaming import Streamer


class Base(DeclarativeBase):
    """The application's own table."""


class Sample(Base):
    __tablename__ = "samples"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    ratio: Mapped[float]
    exact: Mapped[Decimal] = mapped_column(Numeric)
    at: Mapped[datetime] = mapped_column(types.DateTime(timezone=True))
    span: Mapped[timedelta] = mapped_column(Interval)


VALUES: dict[str, Any] = {
    "name": "a\\b'\u20ac\U0001f680",
    "ratio": 0.1 + 0.2,
    "exact": Decimal("123456789012345678901234567890.1234567890"),
    "at": datetime(2026, 2, 1, 3, 4, 5, 6, tzinfo=UTC),
    "span": timedelta(days=-1, hours=2),
}
RECORD = {
    "id": 1,
    "name": VALUES["name"],
    "ratio": 0.30000000000000004,
    "exact": "123456789012345678901234567890.1234567890",
    "at": "2026-02-01T03:04:05.000006+00:00",
    "span": "P-1DT2H",
}


@pytest.fixture
def unusual_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database where every such setting is unusual, since before Penstock's tables were made."""
    url = postgres.create_database("unusual_formats")
    with psycopg.connect(url, autocommit=True) as connection:
        set_unusual(connection)
    initialise(url)
    yield url
    postgres.drop_database("unusual_formats")


@pytest.fixture
def unusual(unusual_url: str) -> Iterator[Engine]:
    """The application's engine."""
    engine = create_engine(engine_url(unusual_url), connect_args={"client_encoding": "UTF8"})
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_a_record_is_the_same_whatever_the_database_is_set_to(
    unusual: Engine, unusual_url: str, redis_url: str
) -> None:
    """Guarantee 22: staged by a session, by a trigger and by hand, streamed, applied and dead-lettered."""
    things = Log("things", shards=1)
    flow, triggers = Pipeline([things]), Pipeline([things])
    flow.stages(Sample, to=things, key="name", object="sample")
    rule = triggers.stages(Sample, to=things, key="name", object="sample", capture="trigger")
    applied: list[Record] = []

    @flow.consumer(reads=things, attempts=1)
    def keeper(_session: Session, records: Sequence[Record]) -> None:
        if any(record.action == "fail" for record in records):
            raise ValueError(VALUES["name"])
        applied.extend(records)

    with unusual.begin() as connection:
        for statement in make_trigger(rule, "penstock").statements:
            connection.execute(text(statement.replace(":", r"\:")))
    sessions = sessionmaker(unusual)
    flow.attach(sessions)
    with sessions.begin() as session:
        session.add(Sample(id=1, **VALUES))
        session.flush()
        common: Any = {"key": VALUES["name"], "object": "sample"}
        stage(session, to=things, **common, action="insert", data={"id": 1, **VALUES})
        stage(session, to=things, **common, action="fail", data=RECORD)
    streamer = Streamer(flow, unusual_url, redis_url)
    streamer.drain()
    streamer.close()
    worker = LogWorker(WorkerSetup(flow, flow.get_consumer("keeper"), unusual_url, redis_url))
    worker.drain()
    worker.close()

    assert [(record.key, record.action, record.data) for record in applied] == [(VALUES["name"], "insert", RECORD)] * 3
    with connect_postgres(unusual_url, application="test") as reading:
        [letter] = dead_letters.of_consumer(Store(reading), "keeper")
        record = dead_letters.read_record(Store(reading), letter)
    assert record is not None
    assert (record.key, record.data) == (VALUES["name"], RECORD)
    assert letter.reason.endswith(VALUES["name"])


def test_commands_do_not_depend_on_how_the_database_writes_times(
    unusual: Engine, flow: Pipeline, things: Log, unusual_url: str, redis_client: Redis, redis_url: str
) -> None:
    @flow.consumer(reads=things)
    def keeper(_session: Session, _records: Sequence[Record]) -> None: ...

    worker = LogWorker(WorkerSetup(flow, flow.get_consumer("keeper"), unusual_url, redis_url))
    worker.drain()
    worker.close()
    with unusual.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO penstock.reconciliations (name, consumer, intent, engine) VALUES ('r', 'keeper', 'compare', 'inline')"
            )
        )
    with connect_postgres(unusual_url, application="test") as reading:
        assert [each.consumer for each in list_consumers(Store(reading))] == ["keeper"]
        [channel] = registered_channels(Store(reading)).values()
        assert channel.keep.total_seconds() == things.keep
        assert dead_letters.newest(Store(reading)) == []
        assert {f.check for f in diagnose(Store(reading), redis_client, flow) if f.grade == "error"} == {"durability"}
        assert [run.name for run in last_runs(Store(reading))] == ["r"]
        assert status(Store(reading), redis_client, pipeline=flow).consumers != ()


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_lacks_characters_is_refused_by_name(
    postgres: EmbeddedPostgres, redis_client: Redis, encoding: str
) -> None:
    """Guarantee 22: otherwise a key, or the reason why a handler failed, could not be stored."""
    name = f"in_{encoding.lower()}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LOCALE 'C'".encode())
    url = postgres.database_url(name)
    try:
        with pytest.raises(UnsafeSetting, match=f"database {name} has the encoding {encoding}"):
            initialise(url)
        with connect_postgres(url, application="test") as connected:
            findings = diagnose(Store(connected), redis_client)
        assert [f.grade for f in findings if f.check == "encoding"] == ["error"]
    finally:
        postgres.drop_database(name)
