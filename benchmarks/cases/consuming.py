"""A consumer with a backlog in the log: one thread reads, handles, and commits with the checkpoint."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from sqlalchemy.orm import Session

from benchmarks.application import (
    ASYNC,
    ASYNC_EACH,
    BULK,
    EACH,
    make_async_pipeline,
    total_each,
    total_in_bulk,
)
from benchmarks.backlogs import Backlog, Scale
from benchmarks.cases import limits
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.peer_scripts import find_peers
from benchmarks.servers import BenchServers
from penstock import Pipeline
from penstock.channels.log import read
from penstock.consuming import LogWorker
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
            peers=find_peers("consume", servers, bulk),
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


def measure_consumer(
    servers: BenchServers, backlog: Backlog, name: str, pipeline: Pipeline | None = None
) -> Figures:
    """Records per second of one worker that applies the log; without connecting.

    Raises:
        NotMeasured: It applied a different number of records.
    """
    database_url = servers.publish_and_register(backlog)
    pipeline = pipeline or backlog.pipeline
    consumer = pipeline.get_consumer(name)
    worker = LogWorker(pipeline, consumer, database_url, servers.redis_url)
    try:
        worker.open()
        began = perf_counter()
        done = worker.drain()
        took = perf_counter() - began
    finally:
        worker.close()
    if done != backlog.records:
        raise NotMeasured(f"{done} of {backlog.records} records were applied")
    return {"": done / took}


def count_applied(connection: Connection, consumer: str) -> int:
    """Number of records that the consumer has applied, from its checkpoints."""
    [(count,)] = connection.execute(
        "SELECT coalesce(sum(applied), 0)::bigint FROM penstock.checkpoints WHERE consumer = %s",
        [consumer],
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
    batches: list[list[Record]] = []
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
