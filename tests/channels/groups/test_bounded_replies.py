"""However large the records are: a script holds, and a reply has, about 8 MiB of entries."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from channels.groups.conftest import GroupedLog, Reader
from fixtures.constants import SetConstants
from fixtures.logs import MakeWriter
from penstock.channels.driving import drive
from penstock.channels.scripts import operate
from penstock.clients import LogReader

MIB = 1024 * 1024
LARGE = '"' + "x" * (MIB - 2) + '"'


@contextmanager
def holding_less_than(client: redis.Redis, most: int) -> Iterator[None]:
    """The server needs less than that beside its data meanwhile, unless it once needed more and can no longer tell."""
    before = client.info("memory")
    yield
    after = client.info("memory")
    assert after["used_memory_peak"] < max(before["used_memory_peak"] + 1, before["used_memory"] + most)


@pytest.fixture
def large(work: GroupedLog) -> GroupedLog:
    """One small record, which tells nothing of those to come, and forty of 1 MiB."""
    work.append(1)
    for _ in range(40):
        work.append(1, data=LARGE)
    return work


def test_a_read_of_a_group_ends_after_8_mib(large: GroupedLog, reader: Reader, redis_client: redis.Redis) -> None:
    group, sizes, at = reader(), [], 1
    with holding_less_than(redis_client, 36 * MIB):
        while taken := group.read(1000):
            assert [record.offset for record in taken] == list(range(at, at + len(taken)))
            sizes.append(len(taken))
            at += len(taken)
    assert sizes == [9, 8, 8, 8, 8]


def make_due(client: redis.Redis) -> None:
    """Makes all pending records due again."""
    due = "penstock:{work/0}:group:mailers:due"
    pending: dict[Any, int] = dict.fromkeys(client.zrange(due, 0, -1), 1)
    client.zadd(due, pending)


def test_records_that_are_due_again_come_8_mib_at_a_time(
    large: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    group = reader(retry_s=60, max_pending=100)
    while group.read(1000):
        pass
    make_due(redis_client)
    sizes = []
    while taken := group.read(1000):
        sizes.append(len(taken))
    assert sizes == [9, 8, 8, 8, 8]


def test_the_entry_that_reaches_the_limit_is_the_last_one(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    """Of new records, and of those that are due again."""
    for _ in range(3):
        work.append(1)
    entries: Any = redis_client.xrange("penstock:{work/0}:log")
    [(_, fields), *_] = entries
    set_constants("channels.log.log_reader", MAX_BYTES=len(b"".join([*fields, *fields.values()])))
    group = reader(retry_s=60)
    assert [group.read().records.offsets for _ in range(4)] == [[1], [2], [3], []]
    make_due(redis_client)
    assert [group.read().records.offsets for _ in range(4)] == [[1], [2], [3], []]


def test_shards_share_the_8_mib(packed: GroupedLog, reader: Reader) -> None:
    for shard in range(4):
        for _ in range(6):
            packed.append(1, shard=shard, data=LARGE)
    group, sizes = reader(shards=4), []
    while taken := group.read(1000):
        sizes.append(len(taken))
    assert sizes == [8, 8, 8]


def test_an_eviction_by_age_reads_4_mib_a_call(make_writer: MakeWriter, redis_client: redis.Redis) -> None:
    writer = make_writer()
    for _ in range(40):
        writer.append(["x" * (MIB - 2)])

    def call() -> tuple[int, bool]:
        [evicted] = drive(redis_client, operate([writer._evicting(0, None, None, 0.0)], "evicting"))
        return evicted.available, evicted.is_complete

    with holding_less_than(redis_client, 20 * MIB):
        assert call() == (5, False)
    evicted = writer.evict(older_than_s=0)
    assert (evicted.available, evicted.last) == (41, 40)


def test_a_reader_holds_as_much_whatever_comes_after_small_entries(
    large: GroupedLog, redis_url: str, redis_client: redis.Redis
) -> None:
    with LogReader.connect(redis_url, "work") as reader, holding_less_than(redis_client, 36 * MIB):
        assert len(reader.read(count=10_000)) == 9
