"""What is staged for a queue: the tenant in the key, the rest in a header of Penstock's own."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fixtures.application import StagedRecords
from fixtures.postgres import engine_url
from penstock import Ick, Log, Pipeline, Queue, Unique, stage, stage_async, stage_many, stage_many_async
from penstock.errors import DeclarationError, InvalidRecord
from penstock.staging.triggers import make_trigger

receipts, rides = Queue("receipts", shards=3), Log("rides")
pytestmark = pytest.mark.channels(receipts, rides)
JOB: Any = {"action": "send", "object": "receipt", "data": {"fare": 5}}
DUE = datetime(2026, 12, 1, 8, tzinfo=UTC)


class Base(DeclarativeBase):
    """The application's tables."""


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str | None]
    region: Mapped[int] = mapped_column(default=1)
    secret: Mapped[str | None] = mapped_column(info={"secret": True})


class Captured(Base):
    __tablename__ = "captured"

    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str | None]
    region: Mapped[int | None] = mapped_column(default=1)


@pytest.fixture
def sessions(engine: Engine, pipeline: Pipeline) -> sessionmaker[Session]:
    Base.metadata.create_all(engine)
    made = sessionmaker(engine)
    pipeline.attach(made)
    return made


def test_the_tenant_is_the_key_and_decides_the_shard(sessions: sessionmaker[Session], staged: StagedRecords) -> None:
    with sessions.begin() as session:
        stage(session, to=receipts, tenant=7, **JOB)
        stage(session, to=receipts, tenant=("a", 1), headers={"trace": "x"}, **JOB)

    first, second = staged()
    assert (first.key, first.shard, first.headers) == ("7", receipts.shard_for("7"), None)
    assert (second.key, second.headers) == ('["a", 1]', {"trace": "x"})
    assert (first.action, first.object, first.data) == ("send", "receipt", {"fare": 5})


def test_what_only_queues_have_stands_under_one_reserved_header(
    sessions: sessionmaker[Session], staged: StagedRecords
) -> None:
    unique = Unique("receipt-7", window=60)
    with sessions.begin() as session:
        stage(
            session,
            to=receipts,
            tenant="a",
            key=9,
            due=DUE,
            delay=None,
            deadline=(DUE + timedelta(days=1)).astimezone(timezone(timedelta(hours=2))),
            unique=unique,
            **JOB,
        )
        stage(session, to=receipts, tenant="a", delay=1.5, headers={"trace": "x"}, **JOB)

    first, second = staged()
    assert first.headers == {
        "penstock": {
            "key": "9",
            "due": 1796112000000,
            "deadline": 1796198400000,
            "unique": {"name": "receipt-7", "until": "window", "for_s": 60},
        }
    }
    assert second.headers == {"trace": "x", "penstock": {"delay_ms": 1500}}


def test_many_are_one_insert_in_order(
    sessions: sessionmaker[Session], statements: list[str], staged: StagedRecords
) -> None:
    with sessions.begin() as session:
        session.connection()
        statements.clear()
        made: Any = ({"tenant": n % 3, "key": n, **JOB} for n in range(300))
        assert stage_many(session, to=receipts, records=made) == 300
        assert len([sent for sent in statements if sent.startswith("INSERT")]) == 1

    assert [record.headers["penstock"]["key"] for record in staged()] == [str(n) for n in range(300)]


def test_async_sessions_stage_the_same(database_url: str, pipeline: Pipeline, staged: StagedRecords) -> None:
    of_b: Any = {"tenant": "b", **JOB}

    async def run() -> None:
        engine = create_async_engine(engine_url(database_url))
        sessions = async_sessionmaker(engine)
        pipeline.attach(sessions)
        async with sessions.begin() as session:
            await stage_async(session, to=receipts, tenant="a", delay=2, **JOB)
            await stage_many_async(session, to=receipts, records=[of_b])
        await engine.dispose()

    asyncio.run(run())

    assert [record.key for record in staged()] == ["a", "b"]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "tenant", "is missing: receipts is a queue"),
    ({"tenant": None}, "tenant", "is missing"),
    ({"tenant": ""}, "tenant", "takes 1 to"),
    ({"tenant": "ü" * 129}, "tenant", "has 258 bytes; it takes 256"),
    ({"tenant": "a\1b"}, "tenant", "control character"),
    ({"tenant": "a\0b"}, "tenant", "NUL"),
    ({"tenant": "\udc00"}, "tenant", "surrogate"),
    ({"tenant": 1.5}, "tenant", "is of type float"),
    ({"tenant": "a", "key": "k" * 257}, "key", "has 257 bytes"),
    ({"tenant": "a", "key": b"k"}, "key", "is of type bytes"),
    ({"tenant": "a", "delay": -1}, "delay", "it takes seconds"),
    ({"tenant": "a", "delay": float("nan")}, "delay", "it takes seconds"),
    ({"tenant": "a", "delay": 1, "due": DUE}, "due", "exclude each other"),
    ({"tenant": "a", "due": datetime(2026, 1, 1)}, "due", "without a time zone"),  # noqa: DTZ001
    ({"tenant": "a", "deadline": datetime(2026, 1, 1)}, "deadline", "time zone"),  # noqa: DTZ001
    ({"tenant": "a", "unique": Unique("")}, "unique.name", "is empty"),
    ({"tenant": "a", "unique": Unique("n", window=-1)}, "unique.window", "it takes seconds"),
    ({"tenant": "a", "delay_s": 1}, "delay_s", "is unknown; a message takes deadline, delay"),
    ({"tenant": "a", "headers": {"penstock": 1}}, "headers.penstock", "Penstock's own"),
    ({"tenant": "a", "data": b"x"}, "data", "is of type bytes"),
]


def test_a_wrong_part_is_refused_at_the_call(sessions: sessionmaker[Session], staged: StagedRecords) -> None:
    for given, field, reason in WRONG:
        records: Any = [{"tenant": "a", **JOB}, {**JOB, **given}]
        with sessions.begin() as session:
            with pytest.raises(InvalidRecord, match=reason) as caught:
                stage(session, to=receipts, **{**JOB, **given})
            with pytest.raises(InvalidRecord, match=reason) as of_many:
                stage_many(session, to=receipts, records=records)

        assert caught.value.field == field
        assert of_many.value.field == f"records[1].{field}"
    assert staged() == []


@pytest.mark.parametrize("name", ["tenant", "due", "delay", "deadline", "unique"])
def test_what_only_queues_have_is_refused_for_a_log(sessions: sessionmaker[Session], name: str) -> None:
    given: Any = {name: "x"}
    with (
        sessions.begin() as session,
        pytest.raises(InvalidRecord, match=f"^{name}: is for queues, and channel rides is a log"),
    ):
        stage(session, to=rides, key=1, **JOB, **given)


def test_a_rule_stages_objects_for_a_queue(
    sessions: sessionmaker[Session], pipeline: Pipeline, staged: StagedRecords
) -> None:
    pipeline.stages(Order, to=receipts, tenant=("account", "region"), key="id", data=["id"])
    with sessions.begin() as session:
        session.add(Order(id=1, account="a"))
        session.flush()
        session.execute(text("SELECT 1"))
        with session.begin_nested() as savepoint:
            session.add(Order(id=2, account="a"))
            session.flush()
            savepoint.rollback()

    [record] = staged()
    assert (record.key, record.headers) == ('["a", 1]', {"penstock": {"key": "1"}})


@pytest.mark.parametrize("tenant", [None, "", "x" * 257], ids=["none", "empty", "long"])
def test_a_rule_whose_tenant_has_no_value_fails_the_flush(
    sessions: sessionmaker[Session], pipeline: Pipeline, tenant: str | None
) -> None:
    pipeline.stages(Order, to=receipts, tenant=lambda order: order.account)
    with sessions() as session:
        session.add(Order(id=1, account=tenant))
        with pytest.raises(InvalidRecord, match="tenant"):
            session.flush()


@pytest.mark.parametrize(
    ("channel", "parts", "reason"),
    [
        (receipts, {"key": "id"}, "is a queue, and each of its messages needs a tenant"),
        (rides, {"key": "id", "tenant": "account"}, "tenant is for queues"),
        (rides, {}, "key is missing"),
        (receipts, {"tenant": ()}, "tenant is empty"),
        (receipts, {"tenant": "nothing"}, "no attribute 'nothing'"),
        (receipts, {"tenant": "secret"}, "its tenant secret is marked secret"),
        (receipts, {"tenant": "account", "headers": {"penstock": 1}}, "Penstock's own"),
        (receipts, {"tenant": str, "capture": "trigger"}, "cannot call Python"),
    ],
)
def test_a_rule_that_does_not_fit_its_channel_is_refused(
    pipeline: Pipeline, channel: Queue | Log, parts: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DeclarationError, match=reason):
        pipeline.stages(Order, to=channel, **parts)


def test_a_queue_marks_nothing_dirty(pipeline: Pipeline) -> None:
    wrong: Any = receipts
    with pytest.raises(DeclarationError, match="is not an Ick"):
        pipeline.marks_dirty(Order, to=wrong, key="id")
    assert Ick("index").kind == "ick"


@pytest.fixture
def captured(sessions: sessionmaker[Session], pipeline: Pipeline, database_url: str) -> Iterator[Callable[..., None]]:
    rule = pipeline.stages(Captured, to=receipts, tenant="account", key=["id", "region"], capture="trigger")
    plain = create_engine(engine_url(database_url))
    with plain.begin() as connection:
        for statement in make_trigger(rule, "penstock").statements:
            connection.execute(text(statement.replace(":", r"\:")))

    def insert(account: str | None, region: int | None) -> None:
        with plain.begin() as connection:
            values = {"account": account, "region": region}
            connection.execute(text("INSERT INTO captured (account, region) VALUES (:account, :region)"), values)

    yield insert
    plain.dispose()


def test_a_trigger_stages_the_same(captured: Callable[..., None], staged: StagedRecords) -> None:
    captured("a", 5)
    captured("b", None)

    first, second = staged()
    assert (first.key, first.shard) == ("a", receipts.shard_for("a"))
    assert first.headers == {"penstock": {"key": "[1, 5]"}}
    assert second.headers == {"penstock": {}}


@pytest.mark.parametrize("tenant", [None, "", "ü" * 129])
def test_a_trigger_refuses_a_tenant_that_a_queue_cannot_take(captured: Callable[..., None], tenant: str | None) -> None:
    with pytest.raises(IntegrityError, match="tenant of a row of captured") as caught:
        captured(tenant, 1)
    assert isinstance(caught.value.orig, psycopg.errors.CheckViolation)
