"""A gap in the log is filled from the journal without stepping over what the journal has lost, too."""

from collections.abc import Callable, Sequence

import pytest
import redis
from sqlalchemy.orm import Session

from fixtures.flow import OpenWorker, Publish
from penstock import Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.consuming.journals import Limit, backfill
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import Gap
from penstock.records import Offset, Record

pytestmark = pytest.mark.things(shards=1)


@pytest.fixture
def seen() -> list[int]:
    """Offsets that the handler got."""
    return []


@pytest.fixture
def worker(flow: Pipeline, things: Log, seen: list[int], open_worker: OpenWorker) -> LogWorker:
    @flow.consumer(reads=things, batch=15)  # no divisor of a journal row's records
    def reader(_: Session, records: Sequence[Record]) -> None:
        seen.extend(record.offset for record in records)

    return open_worker()


Lose = Callable[[int, str], None]


@pytest.fixture
def lose(publish: Publish, connection: Connection, things: Log, worker: LogWorker, redis_client: redis.Redis) -> Lose:
    """Publishes three journal rows of 20 records each; then loses entries of the log, and rows of Postgres."""
    assert worker.consumer.name == "reader", "it is registered before the first record"
    [shard] = things.shard_names

    def publish_and_lose(entries_before: int, rows: str) -> None:
        for number in range(3):
            publish(20, f"{number} ")
        redis_client.xtrim(log_keys("penstock", shard).stream, minid=f"{entries_before}-0", approximate=False)
        connection.execute(f"DELETE FROM penstock.{rows}".encode())

    return publish_and_lose


def read_until_halted(worker: LogWorker) -> list[str]:
    """The reasons for which shards are halted after a few rounds."""
    return list({s: why for _ in range(5) for s, why in worker.round(0).halted.items()}.values())


def test_a_journal_that_begins_inside_the_gap_halts_the_shard(lose: Lose, worker: LogWorker, seen: list[int]) -> None:
    """Guarantee 12: what the journal still has of the gap is no substitute for what it lost."""
    lose(45, "journal WHERE first_offset = 1")

    [reason] = worker.round(0).halted.values()

    assert "the journal begins at 21" in reason
    assert "things/0 offset 20" in reason, "up to where it may be passed"
    assert seen == []


def test_a_hole_in_the_journal_halts_the_shard_at_the_hole(
    lose: Lose, worker: LogWorker, seen: list[int], connection: Connection, things: Log
) -> None:
    """Guarantee 12: records before the hole are applied, none behind it."""
    lose(55, "journal WHERE first_offset = 21")

    [shard] = things.shard_names

    def fill(after: int, before: int, count: int) -> list[int]:
        found = backfill(Store(connection), shard, Offset(after), Offset(before), Limit(count))
        return [record.offset for record in found]

    assert fill(10, 13, 15) == [11, 12]
    assert fill(10, 55, 3) == [11, 12, 13]
    assert fill(15, 55, 15) == fill(15, 55, 40) == [16, 17, 18, 19, 20]
    [reason] = read_until_halted(worker)

    assert "things/0 offset 40" in reason
    assert seen == list(range(1, 21))


def test_a_staged_record_missing_within_a_journal_row_halts_the_shard_there(
    lose: Lose, worker: LogWorker, seen: list[int]
) -> None:
    """Guarantee 12: the journal names the record, but Postgres no longer has it."""
    lose(55, "staged_records WHERE id = 16")

    halted = read_until_halted(worker)

    assert len(halted) == 1
    assert seen == list(range(1, 16))


def test_a_gap_in_log_and_journal_stops_its_shard_and_not_the_worker(
    lose: Lose, worker: LogWorker, seen: list[int], connection: Connection
) -> None:
    """The end of the log is known, and its entries are gone, with the row of the journal that named them."""
    lose(61, "journal WHERE first_offset = 41")
    with pytest.raises(Gap, match=r"removed before this consumer had passed them \(20 records\)"):
        worker.drain()

    assert seen == [*range(1, 41)]
    assert worker.round(0).idle
    [(reason,)] = connection.execute("SELECT waiting FROM penstock.checkpoints").fetchall()
    assert "were removed before this consumer had passed them (20 records)" in reason
