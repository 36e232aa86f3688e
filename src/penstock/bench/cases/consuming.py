"""A consumer with a backlog in the log: read, handled, committed with its checkpoint, by one thread."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from sqlalchemy.orm import Session

from penstock.bench.application import BULK, EACH, total_each, total_in_bulk
from penstock.bench.cases import limits
from penstock.bench.measuring import Case, NotMeasured, Sample
from penstock.bench.peers import peers_of
from penstock.bench.plant import Backlog, Plant, Scale
from penstock.channels.log import read
from penstock.consuming import LogWorker
from penstock.database.connections import Connection, make_engine
from penstock.records import BEGINNING, Record

BATCH = 1000


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """Both kinds of handler."""
    bulk, each = Backlog(scale.records), Backlog(scale.records // 10)
    return [
        Case(
            name="consume-bulk",
            unit="records/s",
            sentence="a consumer applies a backlog; its handler adds a batch up and upserts in one statement",
            ours=lambda: consumed(plant, bulk, BULK),
            limits={
                "xrange": lambda: limits.entries(plant, bulk),
                "handler alone": lambda: _handled(plant, bulk, total_in_bulk),
            },
            peers=peers_of("consume", plant, bulk),
        ),
        Case(
            name="consume-each",
            unit="records/s",
            sentence="a consumer applies a backlog; its handler takes one record a call and upserts it",
            ours=lambda: consumed(plant, each, EACH),
            limits={"handler alone": lambda: _handled(plant, each, _one_by_one)},
        ),
    ]


def consumed(plant: Plant, backlog: Backlog, name: str) -> Sample:
    """Records a second of one consumer's worker that applies the log, once it has connected.

    Raises:
        NotMeasured: It applied another number of records.
    """
    database_url = plant.registered(backlog)
    consumer = backlog.pipeline.get_consumer(name)
    worker = LogWorker(backlog.pipeline, consumer, database_url, plant.redis_url)
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


def applied(connection: Connection, consumer: str) -> int:
    """Records that the consumer has applied, as its checkpoints say."""
    [(count,)] = connection.execute(
        "SELECT coalesce(sum(applied), 0)::bigint FROM penstock.checkpoints WHERE consumer = %s",
        [consumer],
    )
    return int(count)


def _one_by_one(session: Session, records: Sequence[Record]) -> None:
    for record in records:
        total_each(session, record)


def _handled(
    plant: Plant, backlog: Backlog, handler: Callable[[Any, Sequence[Record]], None]
) -> Sample:
    """The handler with records that lie ready, in transactions of the same size; no log, no checkpoint."""
    database_url = plant.registered(backlog)
    batches: list[list[Record]] = []
    with plant.redis() as client:
        for shard in next(iter(backlog.pipeline.channels.values())).shard_names:
            after = BEGINNING
            while some := read(client, backlog.pipeline.namespace, shard, after, BATCH):
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
