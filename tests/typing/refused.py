"""Handlers that type checkers refuse: each line carries the error that it must be, and a line without one fails lint."""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import sqlmodel
from pyspark.sql import DataFrame
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Ick, Job, Log, Pipeline, Queue, Record, mark_dirty, stage
from penstock.engines.stealing import Recruiter, enlist_on_hit

rides = Log("rides")
index = Ick("index")
receipts = Queue("receipts")
pipeline = Pipeline([rides, index, receipts])


@dataclass
class Fare:
    amount: int


@dataclass
class Stop:
    name: str


class Place(TypedDict):
    name: str


# --- the number of arguments ---


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def one_argument(records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def no_argument() -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def three_arguments(session: Session, records: Sequence[Record], more: int) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def keywords_only(*, session: Session, records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
async def async_one_argument(records: Sequence[Record]) -> None: ...


# --- batch and each ---


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def record_without_each(session: Session, record: Record) -> None: ...


@pipeline.consumer(reads=rides, each=True)  # type: ignore[arg-type]
def batch_with_each(session: Session, records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
async def async_record_without_each(session: AsyncSession, record: Record) -> None: ...


@pipeline.consumer(reads=rides, each=True)  # type: ignore[arg-type]
async def async_batch_with_each(session: AsyncSession, records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def list_of_records(session: Session, records: list[Record]) -> None: ...


# --- sessions ---


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
async def async_with_session(session: Session, records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def sync_with_async_session(session: AsyncSession, records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=rides, each=True)  # type: ignore[arg-type]
async def async_each_with_session(session: Session, record: Record) -> None: ...


@pipeline.consumer(reads=rides, each=True)  # type: ignore[arg-type]
def sync_each_with_async_session(session: AsyncSession, record: Record) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def arguments_swapped(records: Sequence[Record], session: Session) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def session_of_sqlmodel(session: sqlmodel.Session, records: Sequence[Record]) -> None: ...


# --- what would never run ---


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def generator(session: Session, records: Sequence[Record]) -> Iterator[None]:
    yield


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
async def async_generator(session: AsyncSession, records: Sequence[Record]) -> AsyncIterator[None]:
    yield


@pipeline.consumer(reads=rides, each=True)  # type: ignore[arg-type]
def each_generator(session: Session, record: Record) -> Iterator[None]:
    yield


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def returns_something(session: Session, records: Sequence[Record]) -> int:
    return len(records)


# --- Icks and logs ---


@pipeline.consumer(reads=index)  # type: ignore[arg-type]
def ick_with_records(session: Session, records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=index, each=True)  # type: ignore[arg-type]
def ick_with_record(session: Session, record: Record) -> None: ...


@pipeline.consumer(reads=index)  # type: ignore[arg-type]
def ick_with_bytes(session: Session, members: Sequence[bytes]) -> None: ...


@pipeline.consumer(reads=index)  # type: ignore[arg-type]
def member_without_each(session: Session, member: int) -> None: ...


@pipeline.consumer(reads=index, each=True)  # type: ignore[arg-type]
def members_with_each(session: Session, members: list[str]) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def log_with_str(session: Session, records: Sequence[str]) -> None: ...


@pipeline.consumer(reads=rides, each=True)  # type: ignore[arg-type]
def log_with_each_str(session: Session, record: str) -> None: ...


# --- DataFrames ---


@pipeline.consumer(reads=rides, dataframe=True)  # type: ignore[arg-type]
async def async_frame(session: AsyncSession, frame: DataFrame) -> None: ...


@pipeline.consumer(reads=rides, dataframe=True)  # type: ignore[arg-type]
def frame_with_records(session: Session, records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=rides)  # type: ignore[arg-type]
def frame_without_dataframe(session: Session, frame: DataFrame) -> None: ...


# --- payloads ---


@pipeline.consumer(reads=rides, payload=Fare)  # type: ignore[arg-type]
def another_payload(session: Session, records: Sequence[Record[Stop]]) -> None: ...


@pipeline.consumer(reads=rides, payload=Fare, each=True)  # type: ignore[arg-type]
def another_each_payload(session: Session, record: Record[Stop]) -> None: ...


@pipeline.consumer(reads=rides, payload=Fare)  # type: ignore[arg-type]
async def another_async_payload(session: AsyncSession, records: Sequence[Record[Stop]]) -> None: ...


@pipeline.consumer(reads=rides, payload=Fare, each=True)
def unknown_attribute(session: Session, record: Record[Fare]) -> None:
    assert record.payload.price == 1  # type: ignore[attr-defined]


@pipeline.consumer(reads=rides, payload=Place, each=True)
def unknown_item(session: Session, record: Record[Place]) -> None:
    assert record.payload["title"] == "Oslo"  # type: ignore[typeddict-item]


@pipeline.consumer(reads=rides, payload=Fare, each=True)
async def payload_of_another_type(session: AsyncSession, record: Record[Fare]) -> None:
    amount: str = record.payload.amount  # type: ignore[assignment]
    assert amount


# --- other things that can be called ---


def of_table(table: str, session: Session, records: Sequence[Record]) -> None: ...


class Totals:
    def apply(self, session: Session, record: Record) -> None: ...

    def __call__(self, records: Sequence[Record]) -> None: ...


pipeline.consumer(reads=rides, name="wrong-partial")(partial(of_table, 1))  # type: ignore[arg-type]
pipeline.consumer(reads=rides, name="method")(Totals().apply)  # type: ignore[arg-type]
pipeline.consumer(reads=rides, name="unbound")(Totals.apply)  # type: ignore[arg-type]
pipeline.consumer(reads=rides, name="object")(Totals())  # type: ignore[arg-type]
pipeline.consumer(reads=rides, name="text")("handler")  # type: ignore[call-overload]
pipeline.consumer(reads=rides)(None)  # type: ignore[call-overload]


# --- options ---

pipeline.consumer(reads="rides")  # type: ignore[call-overload]
pipeline.consumer(rides)  # type: ignore[call-overload]
pipeline.consumer(reads=rides, batsch=10)  # type: ignore[call-overload]
pipeline.consumer(reads=rides, batch="10")  # type: ignore[call-overload]
pipeline.consumer(reads=rides, on_poison="ignore")  # type: ignore[call-overload]
pipeline.consumer(reads=rides, isolation="READ UNCOMMITTED")  # type: ignore[call-overload]
pipeline.consumer(reads=rides, payload=Fare(1))  # type: ignore[call-overload]
pipeline.consumer(reads=rides, dataframe=True, each=True)  # type: ignore[call-overload]
pipeline.consumer(reads=rides, dataframe=True, payload=Fare)  # type: ignore[call-overload]
pipeline.consumer(reads=index, payload=Fare)  # type: ignore[call-overload]
pipeline.consumer(reads=index, dataframe=True)  # type: ignore[call-overload]
pipeline.consumer(reads=rides, start="last")  # type: ignore[call-overload]
pipeline.consumer(reads=rides, park_key="yes")  # type: ignore[call-overload]


# --- workers of queues ---

jobs = Queue("jobs")
pipeline.consumer(reads=jobs)  # type: ignore[call-overload]
pipeline.worker(reads=rides)  # type: ignore[call-overload]
pipeline.worker(reads=jobs, batch=5)  # type: ignore[call-overload]
pipeline.worker(reads=jobs, concurrency="4")  # type: ignore[call-overload]
pipeline.worker(reads=jobs, payload=Fare(1))  # type: ignore[call-overload]


@pipeline.worker(reads=jobs)  # type: ignore[arg-type]
def of_records(session: Session, records: Sequence[Record]) -> None: ...


@pipeline.worker(reads=jobs)  # type: ignore[arg-type]
def returns_a_number(session: Session, job: Job) -> int:
    return 1


# --- reconciliations ---

pipeline.reconciliation(of=1, state="public.totals")  # type: ignore[arg-type]
pipeline.reconciliation(state="public.totals")  # type: ignore[call-arg]
pipeline.reconciliation(of="totals", state="public.totals", key=1)  # type: ignore[arg-type]


# --- jobs of a recruiter ---

recruiter = Recruiter()
recruiter.install(len, "takes an argument", 0.1)  # type: ignore[arg-type]
recruiter.install(lambda: None, "no rate")  # type: ignore[call-arg]


@enlist_on_hit(recruiter)
def find(name: str) -> int | None:
    return None


find(3)  # type: ignore[arg-type]


# --- staging ---


@pipeline.worker(reads=receipts, payload=Fare)
def send_receipt(session: Session, job: Job[Fare]) -> None: ...


typed_rides = Log("typed", payload=Fare)


@pipeline.consumer(reads=typed_rides)  # type: ignore[arg-type]
def payload_of_another_log(session: Session, records: Sequence[Record[Stop]]) -> None: ...


def stage_a_job_wrongly(session: Session, asynchronous: AsyncSession) -> None:
    send_receipt.stage(session, Stop("a"), tenant="t")  # type: ignore[arg-type]
    send_receipt.stage(session, Fare(1))  # type: ignore[call-arg]
    send_receipt.stage(session, Fare(1), tenant="t", delay_s=1)  # type: ignore[call-arg]
    send_receipt.stage(asynchronous, Fare(1), tenant="t")  # type: ignore[arg-type]
    typed_rides.stage(session, Stop("a"), key=1)  # type: ignore[arg-type]
    typed_rides.stage(session, Fare(1))  # type: ignore[call-arg]
    typed_rides.stage(asynchronous, Fare(1), key=1)  # type: ignore[arg-type]
    stage(session, to=typed_rides, key=1, action="a", object="o", data=Stop("a"))  # type: ignore[misc]


def stage_wrongly(session: Session) -> None:
    stage(session, channel=rides, key=1, action="a", object="o", data={})  # type: ignore[call-overload]
    stage(session, to="rides", key=1, action="a", object="o", data={})  # type: ignore[call-overload]
    stage(session, to=rides, key=1, tenant="t", action="a", object="o", data={})  # type: ignore[call-overload]
    stage(session, to=receipts, key=1, action="a", object="o", data={})  # type: ignore[call-overload]
    mark_dirty(session, to=rides, members=[1])  # type: ignore[arg-type]
