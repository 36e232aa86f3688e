"""Traces: from the span that stages a record to those of the handlers it goes through, with OpenTelemetry's own exporter."""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry import trace
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fixtures.engines import Start, effects
from penstock import Log, Pipeline, Queue, Snooze, stage, stage_async, stage_many
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import DeclarationError
from penstock.observing.process_metrics import ProcessMetrics
from penstock.operating.letters import of_consumer, retry
from penstock.records import Record
from penstock.schema.capture import install_triggers
from penstock.staging.payload import MAX_HEADERS_BYTES
from penstock.testing import drained, eventually, staged

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="spans are recorded by OpenTelemetry's SDK")
export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

ReadableSpan = Any
"""One of the SDK."""

ORDERS, BILLS, JOBS = Log("orders", shards=1), Log("bills", shards=2), Queue("receipts", streams=2, hand=1)
pytestmark = pytest.mark.channels(ORDERS, BILLS, JOBS)

APPLICATION = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy import text
from penstock import Log, Pipeline

trace.set_tracer_provider(TracerProvider())
things = Log("things", shards=2)
pipeline = Pipeline([things])

@pipeline.consumer(reads=things, each=True, trace="child")
def one(session, record):
    found = trace.get_current_span().get_span_context()
    values = {"trace": f"{found.trace_id:032x}", "id": record.id}
    session.execute(text("INSERT INTO public.effects VALUES (:trace, :id)"), values)
"""

Spans = Callable[[], dict[str, list[ReadableSpan]]]


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """The spans that have ended, by name."""
    exporter, provider = export.InMemorySpanExporter(), sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(sdk.export.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)

    def ended() -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for span in exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found

    yield ended
    provider.shutdown()


@pytest.fixture
def application_source() -> str:
    return APPLICATION


def in_span(name: str = "request") -> Any:
    return trace.get_tracer("test").start_as_current_span(name)


def stage_order(session: Session, pipeline: Pipeline, key: str = "1", **parts: Any) -> None:
    stage(session, to=ORDERS, key=key, action="placed", object="order", data={}, pipeline=pipeline, **parts)


def trace_ids(spans: Sequence[ReadableSpan]) -> set[int]:
    return {span.get_span_context().trace_id for span in spans}


def test_a_request_and_all_that_its_records_cause_are_one_trace(
    application: Engine, database_url: str, redis_url: str, pipeline: Pipeline, spans: Spans
) -> None:
    """The last step by a rule: its flush belongs to the span of the record."""
    Base.metadata.create_all(application)
    pipeline.stages(Order, to=JOBS, key="id", tenant="id")
    web = FastAPI()

    @web.post("/orders")
    def place() -> None:
        with in_span("POST /orders"), Session(application) as session, session.begin():
            stage_order(session, pipeline)

    @pipeline.consumer(reads=ORDERS, each=True, trace="child")
    async def bill(session: AsyncSession, order: Record) -> None:
        await stage_async(session, to=BILLS, key=order.key, action="sent", object="bill", data={}, pipeline=pipeline)

    @pipeline.consumer(reads=BILLS, each=True, trace="child")
    def send(session: Session, bill: Record) -> None:
        session.add(Order(id=int(bill.key)))

    @pipeline.worker(reads=JOBS, trace="child")
    def receipt(_session: Session, _job: Any) -> None: ...

    TestClient(web).post("/orders").raise_for_status()
    drained(pipeline, database_url, redis_url)

    found, names = spans(), ("POST /orders", "process orders", "process bills", "process receipts")
    chain = [span for name in names for span in found[name]]
    assert len(trace_ids(chain)) == 1
    by_id = {span.get_span_context().span_id: span.name for span in chain}
    parents = {span.name: by_id.get(span.parent.span_id) if span.parent else None for span in chain}
    assert parents == {
        "POST /orders": None,
        "process orders": "POST /orders",
        "process bills": "process orders",
        "process receipts": "process bills",
    }
    assert {span.kind for span in chain if span.name.startswith("process")} == {trace.SpanKind.CONSUMER}


def test_a_provider_that_fails_fails_no_handler(
    application: Engine,
    database_url: str,
    redis_url: str,
    pipeline: Pipeline,
    spans: Spans,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    pipeline.consumer(reads=ORDERS, name="reader")(lambda _session, records: seen.extend(r.key for r in records))
    with Session(application) as session, session.begin():
        stage_order(session, pipeline)

    def refuse(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(trace, "get_tracer", refuse)
    drained(pipeline, database_url, redis_url)

    assert len(seen) == 1
    assert "process orders" not in spans()


def test_a_batch_span_links_to_the_spans_that_staged_it_and_has_no_parent(
    application: Engine, database_url: str, redis_url: str, pipeline: Pipeline, spans: Spans
) -> None:
    pipeline.consumer(reads=ORDERS, name="reader")(lambda _session, _records: None)
    for number in range(40):
        with in_span(f"request {number}"), Session(application) as session, session.begin():
            stage_many(session, [record(number), record(number)], to=ORDERS, pipeline=pipeline)
    with Session(application) as session, session.begin():
        for header in ("garbage", f"00-{'0' * 32}-{'0' * 16}-01", 7, {"traceparent": 1}):
            stage_order(session, pipeline, headers={"traceparent": header})

    with in_span("unrelated"):
        drained(pipeline, database_url, redis_url)

    [span] = spans()["process orders"]
    assert span.parent is None
    assert len(span.links) == 8
    assert trace_ids(spans()["request 0"]) == {span.links[0].context.trace_id}
    assert span.attributes == {
        "messaging.system": "penstock",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "reader",
        "messaging.batch.message_count": 84,
    }


def record(number: int) -> Any:
    return {"key": str(number), "action": "placed", "object": "order", "data": {}, "headers": {"version": 1}}


def test_each_attempt_has_its_span_which_quotes_no_payload(
    application: Engine, database_url: str, redis_url: str, pipeline: Pipeline, spans: Spans
) -> None:
    @pipeline.worker(reads=JOBS, trace="child", attempts=2, backoff="1ms")
    def receipt(_session: Session, job: Any) -> None:
        if job.attempts == 1 and not snoozed:
            snoozed.append(job.id)
            raise Snooze(after="1ms")
        raise ValueError("a payload")

    snoozed: list[int] = []
    with in_span(), Session(application) as session, session.begin():
        stage(session, to=JOBS, tenant="t", action="print", object="bill", data={}, pipeline=pipeline)
    drained(pipeline, database_url, redis_url, allow_dead_letters=True)

    attempts = spans()["process receipts"]
    assert trace_ids(attempts) == trace_ids(spans()["request"])
    assert [[event.name for event in span.events] for span in attempts] == [["Snooze"], [], []]
    assert [span.attributes and span.attributes.get("error.type") for span in attempts] == [None, *["ValueError"] * 2]
    assert [span.status.is_ok for span in attempts] == [True, False, False]
    assert "a payload" not in "".join(span.to_json() for span in attempts)


def test_a_dead_letter_is_retried_in_the_trace_of_its_record(
    application: Engine, connection: Connection, database_url: str, redis_url: str, pipeline: Pipeline, spans: Spans
) -> None:
    """Of a log it is handled at once, of a queue it is staged again."""
    failing = [True]

    @pipeline.consumer(reads=ORDERS, each=True, trace="child", attempts=1)
    def bill(_session: Session, _order: Record) -> None:
        assert not failing

    @pipeline.worker(reads=JOBS, trace="child", attempts=1)
    def receipt(_session: Session, _job: Any) -> None:
        assert not failing

    with in_span(), Session(application) as session, session.begin():
        stage_order(session, pipeline)
        stage(session, to=JOBS, tenant="t", action="print", object="bill", data={}, pipeline=pipeline)
    drained(pipeline, database_url, redis_url, allow_dead_letters=True)
    failing.clear()
    for name in ("bill", "receipt"):
        retry(pipeline, of_consumer(Store(connection), name), database_url)
    drained(pipeline, database_url, redis_url)

    found = spans()
    for name in ("process orders", "process receipts"):
        assert [span.status.is_ok for span in found[name]] == [False, True]
        assert trace_ids(found[name]) == trace_ids(found["request"])


def test_tasks_and_threads_of_a_worker_do_not_take_each_others_spans(
    application: Engine, database_url: str, redis_url: str, pipeline: Pipeline, spans: Spans
) -> None:
    seen: dict[str, int] = {}

    @pipeline.worker(reads=JOBS, trace="child", concurrency=4)
    async def receipt(_session: AsyncSession, job: Any) -> None:
        await asyncio.sleep(0)
        seen[job.headers["traceparent"]] = trace.get_current_span().get_span_context().trace_id

    for number in range(8):
        with in_span(), Session(application) as session, session.begin():
            stage(session, to=JOBS, tenant=f"t{number}", action="a", object="o", data={}, pipeline=pipeline)
    drained(pipeline, database_url, redis_url)

    assert {int(header.split("-")[1], 16) for header in seen} == set(seen.values()) == trace_ids(spans()["request"])
    assert len(seen) == 8


async def take(_session: AsyncSession, _items: Any) -> None: ...


async def take_alone(_job: Any) -> None: ...


HANDLERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "batch": (ORDERS, lambda _session, _orders: None, {}),
    "async batch": (ORDERS, take, {}),
    "record": (ORDERS, lambda _session, _order: None, {"each": True, "trace": "child"}),
    "async record": (ORDERS, take, {"each": True, "trace": "child"}),
    "job": (JOBS, lambda _session, _job: None, {}),
    "async job": (JOBS, take, {}),
    "job without a session": (JOBS, lambda _job: None, {}),
    "async job without a session": (JOBS, take_alone, {"trace": "child"}),
}


@pytest.mark.parametrize(("channel", "handler", "options"), HANDLERS.values(), ids=HANDLERS)
def test_a_latency_leads_to_the_trace_in_which_it_was_measured(
    application: Engine,
    database_url: str,
    redis_url: str,
    pipeline: Pipeline,
    spans: Spans,
    channel: Any,
    handler: Any,
    options: Any,
) -> None:
    metrics, names = ProcessMetrics(pipeline), {"handler_duration"}
    parts: Any = {"tenant": "t"}
    if channel is ORDERS:
        names.add("stage_to_commit")
        parts = {"key": "1"}
    (pipeline.worker if channel is JOBS else pipeline.consumer)(reads=channel, name="reader", **options)(handler)
    with in_span(), Session(application) as session, session.begin():
        stage(session, to=channel, action="a", object="o", data={}, pipeline=pipeline, **parts)
    drained(pipeline, database_url, redis_url)

    [span] = spans()[f"process {channel.name}"]
    answer = metrics.answer("application/openmetrics-text; version=1.0.0").body
    found = re.findall(r'penstock_(\w+)_seconds_bucket{.*} \S+ # {trace_id="(\w+)"}', answer)
    trace_id = f"{span.get_span_context().trace_id:032x}"
    assert sorted(found) == [(name, trace_id) for name in sorted(names)]


def test_a_trace_never_changes_what_the_application_has_set_nor_makes_a_record_fail(
    application: Engine, pipeline: Pipeline, spans: Spans
) -> None:
    full = {"a": "b" * (MAX_HEADERS_BYTES - 10)}
    with Session(application) as session, session.begin():
        stage_order(session, pipeline, headers={})
        with in_span() as span:
            for headers in (None, {}, {"version": 1}, {"traceparent": "mine"}, full):
                stage_order(session, pipeline, headers=headers)
        with trace.use_span(trace.NonRecordingSpan(span.get_span_context())):
            stage_order(session, pipeline)
        found = [each.headers for each in staged(session)]

    context = span.get_span_context()
    own = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-01"}
    assert found == [{}, own, own, {"version": 1, **own}, {"traceparent": "mine"}, full, None]


def test_a_request_that_is_not_sampled_writes_no_headers(
    application: Engine, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        trace, "_TRACER_PROVIDER", sdk.TracerProvider(sampler=sdk.sampling.ALWAYS_OFF, shutdown_on_exit=False)
    )
    with in_span(), Session(application) as session, session.begin():
        stage_order(session, pipeline)
        assert [each.headers for each in staged(session)] == [None]


def test_a_trigger_writes_the_traceparent_that_the_transaction_was_given(
    application: Engine, pipeline: Pipeline
) -> None:
    pipeline.stages(Order, to=ORDERS, key="id", capture="trigger")
    Base.metadata.create_all(application)
    install_triggers(application, pipeline)
    given = f"00-{'1' * 32}-{'2' * 16}-01"
    with application.begin() as connection:
        connection.execute(text("SELECT set_config('penstock.traceparent', :given, true)"), {"given": given})
        connection.execute(text("INSERT INTO orders VALUES (1)"))
    with application.begin() as connection:
        connection.execute(text("INSERT INTO orders VALUES (2)"))
    with Session(application) as session:
        assert [each.headers for each in staged(session)] == [{"traceparent": given}, None]


def test_without_opentelemetry_nothing_is_added(
    application: Engine, pipeline: Pipeline, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_span(), Session(application) as session, session.begin():
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        stage_order(session, pipeline)
        assert [each.headers for each in staged(session)] == [None]


@pytest.mark.parametrize("start", [pytest.param("spark", marks=pytest.mark.spark)], indirect=True)
def test_handlers_on_spark_go_on_in_the_trace_by_what_their_module_configures(
    start: Start, connection: Connection
) -> None:
    """On Spark, since only its processes show whether OpenTelemetry is configured where the handlers are called."""
    headers = json.dumps({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers) "
        "VALUES ('things', 0, 'k', 'insert', 'thing', '{}', %s)",
        [headers],
    )
    start()

    eventually(lambda: len(effects(connection, "ab" * 16)) == 1, "the record has its effect", timeout_s=120)


def test_a_batch_cannot_be_a_child_of_many(pipeline: Pipeline) -> None:
    with pytest.raises(DeclarationError, match=r'trace="child" takes each=True'):
        pipeline.consumer(reads=ORDERS, name="reader", trace="child")(lambda _session, _records: None)
