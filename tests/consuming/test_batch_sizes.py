"""A consumer's batches and the log's entries have sizes of their own: no record is skipped, and no entry is decoded twice."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from fixtures.flow import OpenWorker, Publish
from penstock import Log, Pipeline
from penstock.batches.columns import Columns
from penstock.consuming.log.log_worker import LogWorker
from penstock.records import Record

RECORDS = 600

Work = Callable[..., list[tuple[int, int]]]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each batch of records was decoded, by the id of its first."""
    times: Counter[int] = Counter()
    check = Columns.check

    def counting(columns: Columns) -> None:
        times[columns.first_id] += 1
        check(columns)

    monkeypatch.setattr(Columns, "check", counting)
    return times


@pytest.fixture
def work(
    flow: Pipeline, things: Log, publish: Publish, open_worker: OpenWorker, decoded: Counter[int]
) -> Iterator[Work]:
    """Publishes records in few entries, consumes them in batches, and gives shards and offsets as the handler had them."""
    opened: list[LogWorker] = []

    def consume(batch: int, most: int | None) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        @flow.consumer(reads=things, batch=batch)
        def reader(_: Any, records: Sequence[Record]) -> None:
            seen.extend((record.shard, record.offset) for record in records)

        publish(RECORDS)
        decoded.clear()
        worker = open_worker()
        opened.append(worker)
        with worker:
            decoded.clear()
            if most is None:
                worker.drain()
            else:
                while not worker.slice(most, lambda: False).idle:
                    pass
        return seen

    yield consume
    for worker in opened:
        worker.close()


@pytest.mark.parametrize(("batch", "most"), [(1, None), (7, None), (10_000, None), (500, 7), (7, 50), (50, 50)])
def test_every_record_comes_once_in_order_and_an_entry_is_decoded_once(
    batch: int, most: int | None, work: Work, decoded: Counter[int], redis_client: redis.Redis
) -> None:
    seen = work(batch, most)

    for shard in (0, 1):
        offsets = [offset for number, offset in seen if number == shard]
        assert offsets == [*range(1, len(offsets) + 1)]
    assert len(seen) == RECORDS
    entries = sum(redis_client.xlen(f"penstock:{{things/{shard}}}:log") for shard in (0, 1))
    assert entries <= 4
    assert len(decoded) == entries
    assert set(decoded.values()) == {1}
