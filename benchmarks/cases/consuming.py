"""A consumer with a backlog in the log: one thread reads, handles, and commits with the checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

from sqlalchemy.orm import Session

from benchmarks.application import (
    ASYNC,
    ASYNC_EACH,
    BULK,
    COLUMNS,
    EACH,
    make_async_pipeline,
    make_columns_pipeline,
    total_each,
    total_in_bulk,
)
from benchmarks.backlogs import Backlog, Scale, make_observed, make_variants
from benchmarks.cases import limits
from benchmarks.measuring import Case, Contestant, Figures, NotMeasured
from benchmarks.peer_scripts import find_peers
from benchmarks.servers import BenchServers
from penstock import Pipeline
from penstock.channels.log.streams import read
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, make_engine
from penstock.records import BEGINNING, Record

BATCH = 1000


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """One for each kind of handler."""
    bulk, each = Backlog(scale.records), Backlog(scale.records // 10)
    return [
        Case(
            name="consume-bulk",
            unit="records/s",
            sentence="a consumer applies a backlog; its handler adds up a batch and upserts in one statement",
            ours=lambda: measure_consumer(servers, bulk, BULK),
            limits={
                "xrange": lambda: limits.read_entries(servers, bulk),
                "handler alone": lambda: _measure_handler(servers, bulk, total_in_bulk),
            },
            variants=make_bulk_variants(partial(measure_consumer, servers), bulk),
            peers=find_peers("consume", servers, bulk.kept_as("plain")),
        ),
        Case(
            name="consume-each",
            unit="records/s",
            sentence="a consumer applies a backlog; its handler takes one record per call and upserts it",
            ours=lambda: measure_consumer(servers, each, EACH),
            limits={"handler alone": lambda: _measure_handler(servers, each, _total_one_by_one)},
        ),
        Case(
            name="consume-async",
            unit="records/s",
            sentence="the same backlog and statements as consume-bulk, by a handler that is async def",
            ours=lambda: measure_consumer(servers, bulk, ASYNC, make_async_pipeline()),
            limits={"consume-bulk": lambda: measure_consumer(servers, bulk, BULK)},
        ),
        Case(
            name="consume-async-each",
            unit="records/s",
            sentence="the same backlog and statements as consume-each, by a handler that is async def",
            ours=lambda: measure_consumer(servers, each, ASYNC_EACH, make_async_pipeline()),
            limits={"consume-each": lambda: measure_consumer(servers, each, EACH)},
        ),
    ]


def make_bulk_variants(
    measure: Callable[[Backlog, str, Pipeline | None], Figures], backlog: Backlog
) -> dict[str, Contestant]:
    """The other forms of the log; and a handler that takes columns, from packed entries and from plain ones."""
    return {
        **make_variants(lambda of_form: measure(of_form, BULK, None), backlog),
        **make_observed(lambda observed: measure(observed, BULK, None), backlog),
        "columns": lambda: measure(backlog, COLUMNS, make_columns_pipeline("packed")),
        "columns, zstd": lambda: measure(backlog.kept_as("zstd"), COLUMNS, make_columns_pipeline("zstd")),
        "columns, plain entries": lambda: measure(backlog.kept_as("plain"), COLUMNS, make_columns_pipeline("plain")),
    }


def measure_consumer(servers: BenchServers, backlog: Backlog, name: str, pipeline: Pipeline | None = None) -> Figures:
    """Records per second of one worker that applies the log; without connecting.

    Raises:
        NotMeasured: It applied a different number of records.
    """
    database_url = servers.publish_and_register(backlog)
    with prepare_consumer(servers, backlog, database_url, name, pipeline) as apply_all:
        began = perf_counter()
        apply_all()
        return {"": backlog.records / (perf_counter() - began)}


@contextmanager
def prepare_consumer(
    servers: BenchServers, backlog: Backlog, database_url: str, name: str, pipeline: Pipeline | None = None
) -> Iterator[Callable[[], None]]:
    """Yields what applies the log by one worker, which has connected."""
    pipeline = pipeline or backlog.pipeline
    worker = LogWorker(WorkerSetup(pipeline, pipeline.get_consumer(name), database_url, servers.redis_url))

    def apply_all() -> None:
        done = worker.drain()
        if done != backlog.records:
            raise NotMeasured(f"{done} of {backlog.records} records were applied")

    try:
        worker.open()
        yield apply_all
    finally:
        worker.close()


def count_applied(connection: Connection, consumer: str) -> int:
    """Number of records that the consumer has applied, from its checkpoints."""
    [(count,)] = connection.execute(
        "SELECT coalesce(sum(applied), 0)::bigint FROM penstock.checkpoints WHERE consumer = %s", [consumer]
    )
    return int(count)


def _total_one_by_one(session: Session, records: Sequence[Record]) -> None:
    for record in records:
        total_each(session, record)


def _measure_handler(
    servers: BenchServers, backlog: Backlog, handler: Callable[[Any, Sequence[Record]], None]
) -> Figures:
    """The handler with records in memory, in transactions of the same size; no log, no checkpoint."""
    database_url = servers.publish_and_register(backlog)
    batches: list[Sequence[Record]] = []
    with servers.redis() as client:
        for shard in next(iter(backlog.pipeline.channels.values())).shard_names:
            after = BEGINNING
            while some := read(client, backlog.pipeline.scope.namespace, shard, after, BATCH):
                batches.append(some)
                after = some[-1].offset
    engine = make_engine(database_url, application="bench")
    try:
        engine.connect().close()
        began = perf_counter()
        for batch in batches:
            with Session(engine) as session, session.begin():
                handler(session, batch)
        return {"": backlog.records / (perf_counter() - began)}
    finally:
        engine.dispose()
