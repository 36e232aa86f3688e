"""Jobs and records staged by the call of their worker and their log, typed by ``payload=``."""

import asyncio
import pickle
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import psycopg
import pytest
from pydantic import BaseModel, Field
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from typing_extensions import TypedDict

from fixtures.application import Ride, StagedRecords
from fixtures.postgres import engine_url
from penstock import Cancel, DeadLetter, Job, Log, Pipeline, Queue, Snooze, Unique, stage, stage_many
from penstock.declaring.declarations import WorkerSpec
from penstock.errors import DeclarationError, InvalidRecord, NotAttached
from penstock.testing import make_job, make_record


@dataclass
class SendReceipt:
    ride_id: int
    fare: Decimal = Decimal("12.50")
    day: date = date(2026, 11, 24)


class Model(BaseModel):
    ride_id: int = Field(alias="rideId")
    fare: Decimal


class Struct(msgspec.Struct):
    ride_id: int
    day: date


class Typed(TypedDict):
    ride_id: int


receipts, rides = Queue("receipts", shards=3), Log("rides", payload=SendReceipt)
pytestmark = pytest.mark.channels(receipts, rides)


@pytest.fixture
def send_receipt(pipeline: Pipeline) -> Any:
    @pipeline.worker(reads=receipts, payload=SendReceipt)
    def send_receipt(session: Session, job: Job[SendReceipt]) -> None:
        """Sends it."""
        raise LookupError(job)

    return send_receipt


def test_a_worker_stages_a_job_for_itself(
    engine: Engine, pipeline: Pipeline, send_receipt: Any, staged: StagedRecords
) -> None:
    """On a session that the pipeline is attached to, on one that it is not, and on a connection."""
    attached: sessionmaker[Session] = sessionmaker(engine, class_=type("Own", (Session,), {}))
    pipeline.attach(attached)
    for sessions in (attached, sessionmaker(engine)):
        with sessions.begin() as session:
            send_receipt.stage(session, SendReceipt(17), tenant="account-7", key=1, delay="10m", unique=Unique("r"))
    with engine.begin() as connection:
        send_receipt.stage(connection, SendReceipt(18), tenant="account-7", headers={"trace": "x"})

    first, second, third = staged()
    assert first.data == second.data == {"ride_id": 17, "fare": "12.50", "day": "2026-11-24"}
    assert (first.key, first.action, first.object) == ("account-7", "send_receipt", "SendReceipt")
    assert first.headers is not None
    assert first.headers["penstock"]["delay_ms"] == 600_000
    assert (third.data["ride_id"], third.headers) == (18, {"trace": "x"})


@pytest.mark.parametrize(
    ("model", "good", "bad", "fault"),
    [
        (SendReceipt, {"ride_id": 1}, {"ride_id": "x"}, "ride_id: Input should be a valid integer"),
        (Model, {"rideId": 1, "fare": "2.50"}, {"ride_id": 1, "fare": 2}, "rideId: Field required"),
        (Struct, {"ride_id": 1, "day": "2026-11-24"}, {"ride_id": 1, "day": "today"}, "Invalid RFC3339"),
        (Typed, {"ride_id": 1}, {}, "ride_id: Field required"),
    ],
)
def test_what_consumers_would_dead_letter_is_refused_where_it_is_staged(
    model: Any, good: Any, bad: Any, fault: str, engine: Engine, staged: StagedRecords
) -> None:
    log = Log("typed", payload=model)
    pipeline = Pipeline([log])
    rest: Any = {"key": 1, "action": "insert", "object": "ride", "data": {}}
    with Session(engine) as session, session.begin():
        pipeline.attach(session)
        with pytest.raises(InvalidRecord, match=f"data: does not fit {model.__name__}: .*{fault}"):
            stage(session, to=log, **{**rest, "data": bad})
        records: Any = [{**rest, "data": each} for each in (good, bad)]
        with pytest.raises(InvalidRecord, match=r"records\[1\].data: does not fit"):
            stage_many(session, records, to=log)
        stage(session, to=log, **{**rest, "data": good})

    assert [record.data for record in staged()] == [good]


def test_a_rule_that_does_not_fit_the_model_of_its_log_fails_the_flush(application: Engine) -> None:
    log = Log("typed", payload=Typed)
    pipeline = Pipeline([log])
    pipeline.stages(Ride, to=log, key="id", data=["id"])
    with Session(application) as session:
        pipeline.attach(session)
        session.add(Ride(id=1))
        with pytest.raises(InvalidRecord, match="data: does not fit Typed: ride_id: Field required"):
            session.flush()


def test_the_function_stays_what_it_was(pipeline: Pipeline, send_receipt: Any) -> None:
    assert (send_receipt.name, send_receipt.queue, send_receipt.__doc__) == ("send_receipt", receipts, "Sends it.")
    with pytest.raises(LookupError):
        send_receipt(None, 1)
    assert isinstance(pipeline.consumers["send_receipt"], WorkerSpec)


def test_the_function_may_work_for_two_queues(pipeline: Pipeline, send_receipt: Any, engine: Engine) -> None:
    bulk = Queue("bulk")
    pipeline.add_channel(bulk)
    send_bulk: Any = pipeline.worker(reads=bulk, name="bulk")(send_receipt)

    assert (send_bulk.name, send_bulk.queue) == ("bulk", bulk)
    assert (send_receipt.name, send_receipt.queue) == ("send_receipt", receipts)
    assert pipeline.consumers["bulk"].handler is send_receipt.handler
    with Session(engine) as session, pytest.raises(InvalidRecord, match="due: and a delay exclude each other"):
        send_bulk.stage(session, 1, tenant="t", delay=1, due=datetime(2026, 12, 1, tzinfo=UTC))


def test_outcomes_can_be_copied() -> None:
    for outcome in (Snooze("10m", "why"), Snooze(), Cancel("why"), DeadLetter("why")):
        copied: Any = pickle.loads(pickle.dumps(outcome))
        assert (type(copied), vars(copied), str(copied)) == (type(outcome), vars(outcome), str(outcome))


def test_a_payload_that_is_no_model_is_refused_where_the_log_is_declared() -> None:
    with pytest.raises(DeclarationError, match="channel rides: payload='Ride' takes a class"):
        Log("rides", payload="Ride")  # type: ignore[arg-type]


def test_what_a_test_makes_is_what_is_staged() -> None:
    """``make_record`` knows the payload of its log, and takes what ``stage`` takes."""
    record: Any = make_record(SendReceipt(17), channel=rides)
    assert record.payload == SendReceipt(17)
    job = make_job(SendReceipt(17), payload=SendReceipt)
    assert (job.data["ride_id"], job.payload) == (17, SendReceipt(17))


def test_a_payload_of_another_type_is_refused(engine: Engine, send_receipt: Any, staged: StagedRecords) -> None:
    with Session(engine) as session:
        with pytest.raises(InvalidRecord, match="payload: is of type dict; SendReceipt is declared"):
            send_receipt.stage(session, {"ride_id": 17}, tenant="t")
        with pytest.raises(InvalidRecord, match="payload: is of type int"):
            rides.stage(session, 5, key=1)  # type: ignore[arg-type]
        with pytest.raises(InvalidRecord, match="tenant"):
            send_receipt.stage(session, SendReceipt(1), tenant=None)
        with pytest.raises(NotAttached, match="no pipeline is attached"):
            rides.stage(session, SendReceipt(1), key=1)
    assert staged() == []


def test_a_log_stages_a_record_of_itself(engine: Engine, pipeline: Pipeline, staged: StagedRecords) -> None:
    with Session(engine) as session, session.begin():
        rides.stage(session, SendReceipt(1), key=1, pipeline=pipeline)
        rides.stage(session, SendReceipt(2), key=1, action="insert", object="ride", pipeline=pipeline)

    first, second = staged()
    assert (first.key, first.action, first.object, first.data["ride_id"]) == ("1", "SendReceipt", "rides", 1)
    assert (second.action, second.object) == ("insert", "ride")


def test_a_consumer_has_the_payload_of_its_log(pipeline: Pipeline) -> None:
    pipeline.consumer(reads=rides, name="typed")(lambda _session, _records: None)

    assert pipeline.consumers["typed"].payload is SendReceipt


def test_both_are_awaited_on_what_is_awaited(
    database_url: str, pipeline: Pipeline, send_receipt: Any, staged: StagedRecords
) -> None:
    async def write() -> None:
        engine = create_async_engine(engine_url(database_url))
        async with async_sessionmaker(engine).begin() as session:
            await send_receipt.stage_async(session, SendReceipt(1), tenant="t")
            await rides.stage_async(session, SendReceipt(2), key=1, pipeline=pipeline)
        await engine.dispose()
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            await send_receipt.stage_async(connection, SendReceipt(3), tenant="t")

    asyncio.run(write())

    assert [record.data["ride_id"] for record in staged()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("payload", "written"),
    [
        (Model(rideId=1, fare=Decimal("2.50")), {"rideId": 1, "fare": "2.50"}),
        (Struct(1, date(2026, 1, 2)), {"ride_id": 1, "day": "2026-01-02"}),
        (Typed(ride_id=1), {"ride_id": 1}),
        (SendReceipt(1), {"ride_id": 1, "fare": "12.50", "day": "2026-11-24"}),
    ],
)
def test_models_are_payloads(
    engine: Engine, payload: Any, written: Any, pipeline: Pipeline, staged: StagedRecords
) -> None:
    with Session(engine) as session, session.begin():
        stage(session, to=receipts, tenant="t", action="a", object="o", data=payload, pipeline=pipeline)

    assert [record.data for record in staged()] == [written]
