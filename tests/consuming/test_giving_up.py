"""A dead letter is written in the transaction that moves the checkpoint past its record, and for no other checkpoint."""

from collections.abc import Sequence

import pytest
from sqlalchemy.orm import Session

from fixtures.clients import connect_redis
from fixtures.crash_points import Killed, at_crash_points
from fixtures.flow import OpenWorker, Publish, Site
from penstock import Log, Pipeline
from penstock.channels.log.streams import read
from penstock.consuming import WorkerSetup
from penstock.consuming.journals import LocalJournal
from penstock.consuming.log.log_plans import LogPlans, LogRecords
from penstock.consuming.log.log_worker import LogWorker
from penstock.consuming.transaction import HandlerTransaction
from penstock.database.connections import Connection, connect_postgres
from penstock.records import BEGINNING, DEFAULT_SCOPE, Record

pytestmark = pytest.mark.things(shards=1)

POISON = 3


@pytest.fixture
def worker(flow: Pipeline, things: Log, open_worker: OpenWorker) -> LogWorker:
    @flow.consumer(reads=things, attempts=1)
    def reader(_: Session, records: Sequence[Record]) -> None:
        if any(record.offset == POISON for record in records):
            raise ValueError

    return open_worker()


@pytest.fixture
def published(publish: Publish, worker: LogWorker) -> int:
    """Five records in the log of a registered consumer."""
    assert worker.consumer.name == "reader"
    publish(5)
    return 5


def state(connection: Connection) -> tuple[int, int]:
    """Dead letters, and the checkpoint's offset."""
    [found] = connection.execute(
        'SELECT (SELECT count(*) FROM penstock.dead_letters), "offset" FROM penstock.checkpoints'
    ).fetchall()
    return found[0], found[1]


@pytest.mark.parametrize("crash_at", [None, "consumer.before_commit", "consumer.after_commit"])
def test_nobody_sees_a_dead_letter_without_its_checkpoint_or_the_reverse(
    published: int, worker: LogWorker, connection: Connection, database_url: str, crash_at: str | None
) -> None:
    """Guarantee 21, also if the process ends in the middle."""
    seen = set[tuple[int, int]]()

    def look(point: str) -> None:
        with connect_postgres(database_url, application="other") as other:
            seen.add(state(other))
        if point == crash_at and max(seen)[1] == POISON - 1:
            raise Killed

    try:
        with at_crash_points(look):
            worker.drain()
    except Killed:
        worker.close()
        seen.add(state(connection))
        worker.drain()

    assert all((dead == 1) == (offset >= POISON) for dead, offset in seen)
    assert state(connection) == (1, published)


@pytest.mark.parametrize("change", ['"offset" = 1', '"offset" = 4', "halted = 'by hand'"])
def test_a_record_is_not_dead_lettered_when_the_checkpoint_is_no_longer_before_it(
    site: Site, published: int, worker: LogWorker, change: str
) -> None:
    """Another process went on, or an operator moved or halted the shard, between the last attempt and the giving up."""
    assert published >= POISON
    [shard] = site.things.shard_names
    with connect_redis(site.redis_url) as client:
        poison = read(client, "penstock", shard, BEGINNING, 10)[POISON - 1]
    site.connection.execute(f"UPDATE penstock.checkpoints SET {change}".encode())
    before = state(site.connection)
    journal = LocalJournal(worker.consumer)
    records = LogRecords(worker.consumer, DEFAULT_SCOPE, journal)
    plan = LogPlans(worker.consumer, records, journal).plan_dead_letter(shard, poison, "bad", 3)
    transaction = HandlerTransaction(WorkerSetup(site.flow, worker.consumer, site.database_url))
    delivered = transaction.apply([shard], plan)
    transaction.close()

    assert (delivered.dead, delivered.position) == (0, None)
    assert state(site.connection) == before
