"""Handlers that type checkers accept, and the types that they see; importing this module declares them all."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, assert_type

import msgspec
from pydantic import BaseModel
from pyspark.sql import DataFrame
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from typing_extensions import TypedDict

from penstock import (
    Cancel,
    DeadLetter,
    Ick,
    Job,
    Log,
    Pipeline,
    Queue,
    Record,
    Records,
    Snooze,
    mark_dirty,
    stage,
    stage_many,
)
from penstock.declaring.outcomes import HandlerOutcome
from penstock.engines.stealing import Outcome, Recruiter, enlist_on_hit
from penstock.testing import assert_staged, make_job, make_record

Handler = TypeVar("Handler", bound=Callable[..., object])

rides = Log("rides")
pipeline = Pipeline([rides])


def new_ick(name: str) -> Ick:
    """An Ick has one consumer."""
    ick = Ick(name)
    pipeline.add_channel(ick)
    return ick


@dataclass
class Fare:
    amount: int


class Stop(TypedDict):
    name: str


class Tip(BaseModel):
    amount: int


class Toll(msgspec.Struct):
    amount: int


# --- batches ---


@pipeline.consumer(reads=rides)
def batch(session: Session, records: Sequence[Record]) -> None:
    assert_type(records[0].payload, Any)
    assert_type(records[0].key, str)


assert_type(batch, Callable[[Session, Sequence[Record[Any]]], None])


@pipeline.consumer(reads=rides, each=False, name="named", batch=10, isolation="READ COMMITTED")
def batch_with_options(session: Session, records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=rides)
def takes_any_iterable(session: Session, records: Iterable[Record]) -> None: ...


@pipeline.consumer(reads=rides)
def untyped_payload(session: Session, records: Sequence[Record[Any]]) -> None: ...


@pipeline.consumer(reads=rides)
async def async_batch(session: AsyncSession, records: Sequence[Record]) -> None: ...


@pipeline.consumer(reads=rides)
def columns(session: Session, records: Records) -> None:
    assert_type(records.keys, list[str])
    assert_type(records[0], Record[Any])


async def call_them(session: Session, async_session: AsyncSession) -> None:
    assert_type(batch(session, []), None)
    assert_type(await async_batch(async_session, []), None)


# --- one record a call ---


@pipeline.consumer(reads=rides, each=True)
def each(session: Session, record: Record) -> None:
    assert_type(record, Record[Any])
    assert_type(record.data, Any)
    assert_type(record.headers, dict[str, Any])


@pipeline.consumer(reads=rides, each=True)
async def async_each(session: AsyncSession, record: Record) -> None: ...


# --- payloads with a model ---


@pipeline.consumer(reads=rides, payload=Fare)
def dataclass_payload(session: Session, records: Sequence[Record[Fare]]) -> None:
    assert_type(records[0].payload, Fare)
    assert_type(sum(record.payload.amount for record in records), int)


@pipeline.consumer(reads=rides, payload=Stop, each=True)
def typeddict_payload(session: Session, record: Record[Stop]) -> None:
    assert_type(record.payload, Stop)
    assert_type(record.payload["name"], str)


@pipeline.consumer(reads=rides, payload=Tip)
async def pydantic_payload(session: AsyncSession, records: Sequence[Record[Tip]]) -> None:
    assert_type(records[0].payload, Tip)


@pipeline.consumer(reads=rides, payload=Fare)
async def columns_and_payloads(session: AsyncSession, records: Records[Fare]) -> None:
    assert_type(records[:2][0].payload, Fare)


@pipeline.consumer(reads=rides, payload=Toll, each=True)
async def msgspec_payload(session: AsyncSession, record: Record[Toll]) -> None:
    assert_type(record.payload.amount, int)


@pipeline.consumer(reads=rides, payload=Fare, each=True)
def payload_that_is_not_said(session: Session, record: Record) -> None:
    assert_type(record.payload, Any)


# --- Icks ---


@pipeline.consumer(reads=new_ick("members"))
def members(session: Session, members: Sequence[str]) -> None: ...


@pipeline.consumer(reads=new_ick("member"), each=True)
def member(session: Session, member: str) -> None: ...


@pipeline.consumer(reads=new_ick("async_members"))
async def async_members(session: AsyncSession, members: Sequence[str]) -> None: ...


@pipeline.consumer(reads=new_ick("async_member"), each=True)
async def async_member(session: AsyncSession, member: str) -> None: ...


# --- DataFrames ---


@pipeline.consumer(reads=rides, dataframe=True)
def frame(session: Session, frame: DataFrame) -> None: ...


assert_type(frame, Callable[[Session, DataFrame], None])


# --- other things that can be called ---


def of_table(table: str, session: Session, records: Sequence[Record]) -> None: ...


async def of_table_async(table: str, session: AsyncSession, records: Sequence[Record]) -> None: ...


def with_default(session: Session, records: Sequence[Record], *, dry_run: bool = False) -> None: ...


pipeline.consumer(reads=rides, name="partial")(partial(of_table, "rides"))
pipeline.consumer(reads=rides, name="async-partial")(partial(of_table_async, "rides"))
pipeline.consumer(reads=rides, name="partial-keyword")(partial(with_default, dry_run=True))
pipeline.consumer(reads=rides)(with_default)


class Totals:
    def apply(self, session: Session, records: Sequence[Record]) -> None: ...

    async def apply_async(self, session: AsyncSession, records: Sequence[Record]) -> None: ...

    def apply_fare(self, session: Session, record: Record[Fare]) -> None: ...

    @staticmethod
    def apply_static(session: Session, records: Sequence[Record]) -> None: ...

    @classmethod
    def apply_class(cls, session: Session, records: Sequence[Record]) -> None: ...

    def __call__(self, session: Session, records: Sequence[Record]) -> None: ...


class AsyncTotals:
    async def __call__(self, session: AsyncSession, records: Sequence[Record]) -> None: ...


totals = Totals()
pipeline.consumer(reads=rides)(totals.apply)
pipeline.consumer(reads=rides)(totals.apply_async)
pipeline.consumer(reads=rides, each=True, payload=Fare)(totals.apply_fare)
pipeline.consumer(reads=rides)(Totals.apply_static)
pipeline.consumer(reads=rides)(Totals.apply_class)
pipeline.consumer(reads=rides, name="totals")(totals)
pipeline.consumer(reads=rides, name="async-totals")(AsyncTotals())
pipeline.consumer(reads=rides, name="lambda")(lambda _session, _records: None)


def noted(function: Handler) -> Handler:
    return function


@pipeline.consumer(reads=rides)
@noted
def decorated(session: Session, records: Sequence[Record]) -> None: ...


# --- workers of queues ---

jobs = Queue("jobs")
more_jobs = Queue("more-jobs")
async_jobs = Queue("async-jobs")
mails = Queue("mails")
async_mails = Queue("async-mails")
pipeline.add_channel(jobs)
pipeline.add_channel(more_jobs)
pipeline.add_channel(async_jobs)
pipeline.add_channel(mails)
pipeline.add_channel(async_mails)


@pipeline.worker(reads=jobs)
def job_handler(session: Session, job: Job) -> None: ...


@pipeline.worker(reads=more_jobs, payload=Fare, concurrency=8, lease=10, name="typed")
def typed_job(session: Session, job: Job[Fare]) -> Snooze | Cancel | None:
    assert_type(job.payload, Fare)
    return Snooze("10m")


@pipeline.worker(reads=async_jobs, limit=5.0, attempts=3, backoff=0.1, on_poison="halt")
async def async_job(session: AsyncSession, job: Job) -> DeadLetter | None: ...


@pipeline.worker(reads=mails, payload=Fare)
def job_without_a_session(job: Job[Fare]) -> Snooze | None:
    assert_type(job.payload, Fare)
    return None


@pipeline.worker(reads=async_mails)
async def async_job_without_a_session(job: Job) -> None: ...


def stage_jobs(session: Session, job: Job[Fare]) -> None:
    job_without_a_session.stage(session, Fare(7), tenant="ann")
    assert_type(job_without_a_session(job), HandlerOutcome | None)
    typed_job.stage(session, Fare(7), tenant="ann", delay="10m", key=1)
    job_handler.stage(session, {"any": "JSON"}, tenant=7)
    assert_type(typed_job(session, job), HandlerOutcome | None)


async def stage_jobs_async(session: AsyncSession) -> None:
    await async_job.stage_async(session, {"any": "JSON"}, tenant=7)


typed_log = Log("typed-rides", payload=Fare)
pipeline.add_channel(typed_log)


@pipeline.consumer(reads=typed_log)
def typed_records(session: Session, records: Records[Fare]) -> None:
    assert_type(records[0].payload, Fare)


async def stage_typed(session: Session, asynchronous: AsyncSession) -> None:
    typed_log.stage(session, Fare(7), key=1)
    await typed_log.stage_async(asynchronous, Fare(7), key=1, action="pay", object="fare")
    stage(session, to=typed_log, key=1, action="pay", object="fare", data=Fare(7))


# --- reconciliations ---


@pipeline.reconciliation(of=batch, state="public.totals", key="id")
def canonical(tables: Any) -> str:
    return "SELECT"


assert_type(canonical(1), str)
pipeline.reconciliation(of=async_batch, state="public.totals", key="id", name="a")(canonical)
pipeline.reconciliation(of=each, state="public.totals", key="id", name="b")(canonical)
pipeline.reconciliation(of=frame, state="public.totals", key="id", name="c")(canonical)
pipeline.reconciliation(of=dataclass_payload, state="public.totals", key="id", name="d")(canonical)
pipeline.reconciliation(of=totals, state="public.totals", key="id", name="e")(canonical)


# --- jobs of a recruiter ---

recruiter = Recruiter()


async def give_up() -> Outcome:
    return Outcome.GAVE_UP


recruiter.install(give_up, "coroutine function", 0.1)
recruiter.install(lambda: None, "lambda", 0)


@enlist_on_hit(recruiter)
def find(name: str) -> int | None:
    return None


@enlist_on_hit(recruiter)
async def find_async(name: str) -> int | None:
    return None


assert_type(find("ann"), int | None)


# --- staging ---


def stage_rightly(session: Session) -> None:
    stage(session, to=rides, key=1, action="a", object="o", data={})
    stage(session, to=jobs, tenant=1, action="a", object="o", data={})
    assert_type(stage_many(session, to=rides, records=[]), int)
    assert_type(mark_dirty(session, to=new_ick("marked"), members=[1]), int)
    assert_staged(session, to="rides", key=1)


# --- tests of handlers ---

assert_type(make_record({"amount": 1}, payload=Fare), Record[Fare])
assert_type(make_record({"amount": 1}), Record[Any])
assert_type(make_job({"amount": 1}, payload=Fare).payload, Fare)
