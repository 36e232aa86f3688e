"""Groups with asyncio, on a Cluster, with several shards, and as a user with few rights."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Timer
from time import monotonic
from typing import Any

import pytest
import redis

from channels.groups.conftest import CURSOR, GroupedLog, Reader, offsets
from fixtures.clients import connect_redis
from fixtures.roles import UrlFor
from fixtures.topologies import Cluster
from penstock import Log
from penstock.clients import AsyncLogGroup, LogGroup
from penstock.errors import AppendRefused, InvalidLogCall, InvalidName
from penstock.records import Offset
from penstock.structures.group_results import GroupState
from penstock.testing import eventually


def is_waiting(client: redis.Redis, readers: int) -> bool:
    return client.zcard(f"{CURSOR}:places") == readers


def test_readers_of_asyncio_divide_a_burst_and_acknowledge(
    packed: GroupedLog, redis_url: str, redis_client: redis.Redis
) -> None:
    async def work() -> list[list[int]]:
        groups = [AsyncLogGroup.connect(redis_url, "work", "mailers", retry_s=60) for _ in range(3)]
        reads = []
        for number, group in enumerate(groups, 1):
            reads.append(asyncio.create_task(group.read(10, block_s=60)))
            await asyncio.to_thread(eventually, partial(is_waiting, redis_client, number), "it waits")
        packed.append(6)
        taken = [await each for each in reads]
        assert await groups[0].acknowledge(taken[0]) == 2
        assert await groups[0].acknowledge_offsets(0, (1, 3)) == 1
        [state] = (await groups[0].states()).values()
        assert state.pending == 3
        assert await groups[0].rewind(0, "last") == 7
        await groups[0].delete()
        for group in groups:
            await group.aclose()
        return [offsets(each) for each in taken]

    assert asyncio.run(work()) == [[1, 2], [3, 4], [5, 6]]


def test_a_cancelled_read_ends_at_once_and_keeps_its_turn(
    packed: GroupedLog, redis_url: str, redis_client: redis.Redis
) -> None:
    async def work() -> None:
        group = AsyncLogGroup.connect(redis_url, "work", "mailers")
        for _ in range(5):
            began = monotonic()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(group.read(block_s=60), 0.1)
            assert monotonic() - began < 30
        assert redis_client.zcard(f"{CURSOR}:places") == 1
        packed.append(3)
        assert offsets(await group.read(block_s=60)) == [1, 2, 3]
        assert redis_client.zcard(f"{CURSOR}:places") == 0
        await group.aclose()

    asyncio.run(work())


@pytest.mark.slow
def test_reads_that_are_cancelled_at_any_moment_lose_nothing_that_is_acknowledged(
    packed: GroupedLog, redis_url: str
) -> None:
    """What a cancelled read had taken is delivered again."""

    async def work() -> set[int]:
        group = AsyncLogGroup.connect(redis_url, "work", "mailers", retry_s=0.1)
        done: set[int] = set()
        for number in range(200):
            if number % 2:
                packed.append(2)
            read = asyncio.create_task(group.read(block_s=0.05))
            for _ in range(number % 23):
                await asyncio.sleep(0)
            read.cancel()
            try:
                taken = await read
            except asyncio.CancelledError:
                continue
            await group.acknowledge(taken)
            done |= set(offsets(taken))
        until = monotonic() + 60
        while len(done) < 200 and monotonic() < until:
            taken = await group.read(1000, block_s=1)
            await group.acknowledge(taken)
            done |= set(offsets(taken))
        await group.aclose()
        return done

    assert asyncio.run(work()) == set(range(1, 201))


@pytest.mark.usefixtures("in_turn")
def test_a_group_reads_all_shards_and_divides_what_they_hold_together(
    packed: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """A share is one of all shards, not of each."""
    for shard in range(3):
        packed.append(4, shard=shard)
    group = reader(shards=3)
    redis_client.zadd(f"{CURSOR}:places", {"another": 1})
    seconds, micros = redis_client.time()
    redis_client.zadd(f"{CURSOR}:heard", {"another": seconds * 1000 + micros // 1000 + 500_000})

    first = group.read(100)
    assert len(first) == 6
    redis_client.delete(f"{CURSOR}:places", f"{CURSOR}:heard")
    both = [*first, *reader(shards=3).read(100)]
    assert sorted((record.shard, record.offset) for record in both) == [
        (shard, offset) for shard in range(3) for offset in range(1, 5)
    ]


def test_a_reader_of_several_shards_waits_for_all_of_them(packed: GroupedLog, reader: Reader) -> None:
    group = reader(shards=3)
    for shard in (2, 0, 1):
        timer = Timer(0.05, packed.append, (1,), {"shard": shard})
        timer.start()
        assert [record.shard for record in group.read(block_s=60)] == [shard]
        timer.join()


@pytest.fixture
def spread(cluster: Cluster) -> Iterator[GroupedLog]:
    """A log on a Cluster."""
    with connect_redis(cluster.url) as client:
        yield GroupedLog(client)


@pytest.mark.slow
def test_a_group_on_a_cluster_reads_shards_on_several_nodes(spread: GroupedLog, cluster: Cluster) -> None:
    client = spread.client
    ports = {client.get_node_from_key(spread.stream(shard)).port for shard in range(6)}
    assert len(ports) == 3
    groups = [LogGroup.connect(cluster.url, "work", "mailers", shards=6, retry_s=60) for _ in "ab"]
    seen: list[tuple[int, int]] = []
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(each.read, 1000, block_s=20) for each in groups]
        eventually(lambda: client.zcard(f"{CURSOR}:places") == 2, "both wait")
        for shard in range(6):
            spread.append(4, shard=shard)
        for future in futures:
            seen += [(record.shard, record.offset) for record in future.result(20)]
    while taken := groups[0].read(1000, block_s=0.1):
        seen += [(record.shard, record.offset) for record in taken]
    assert sorted(seen) == [(shard, offset) for shard in range(6) for offset in range(1, 5)]
    assert sum(groups[0].acknowledge_offsets(shard, (1, 4)) for shard in range(6)) == 24

    async def wait() -> list[int]:
        group = AsyncLogGroup.connect(cluster.url, "work", "mailers", shards=6, retry_s=60)
        Timer(0.2, spread.append, (1,), {"shard": 5}).start()
        taken = await group.read(block_s=20)
        await group.delete()
        await group.aclose()
        return offsets(taken)

    assert asyncio.run(wait()) == [5]
    for each in groups:
        each.close()


@pytest.fixture
def consumer(redis_url_for: UrlFor) -> Iterator[LogGroup]:
    """A reader that logs in as the consumers of a pipeline."""
    with LogGroup.connect(redis_url_for("consumer"), "work", "mailers", retry_s=0.05) as group:
        yield group


def test_a_consumer_of_the_pipeline_has_the_rights_and_a_viewer_sees_the_states(
    packed: GroupedLog, consumer: LogGroup, redis_url_for: UrlFor
) -> None:
    packed.append(3)
    taken = consumer.read()
    assert offsets(consumer.read(block_s=60)) == [1, 2, 3]
    assert consumer.acknowledge(taken) == 3
    assert consumer.rewind(0, 2) == 2
    assert offsets(consumer.read()) == [2, 3]
    with LogGroup.connect(redis_url_for("viewer"), "work", "mailers") as viewer:
        [state] = viewer.states().values()
        assert state.pending == 2
        packed.append(1)
        with pytest.raises(AppendRefused, match="penstock init --roles --acl"):
            viewer.read()
    assert 4 in offsets(consumer.read()), "the refused read has moved nothing"
    consumer.delete()


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("shards", {"shards": 0}),
        ("shards", {"shards": True}),
        ("shards", {"shards": "4"}),
        ("max_pending", {"max_pending": 0}),
        ("max_pending", {"max_pending": 1.5}),
        ("retry_s", {"retry_s": 0}),
        ("retry_s", {"retry_s": "60"}),
        ("retry_s", {"retry_s": True}),
        ("retry_s", {"retry_s": float("nan")}),
        ("expire_s", {"expire_s": 5}),
        ("expire_s", {"retry_s": 1, "expire_s": -1}),
        ("start", {"start": "middle"}),
        ("start", {"start": ["first"]}),
        ("evicted", {"evicted": "null"}),
    ],
)
def test_an_option_out_of_range_is_refused(reader: Reader, field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidLogCall) as refused:
        reader(**options)
    assert refused.value.field == field


@pytest.mark.parametrize("options", [{"group": "a:b"}, {"log": ""}, {"namespace": "*"}])
def test_a_name_that_cannot_be_is_refused(reader: Reader, options: dict[str, str]) -> None:
    with pytest.raises(InvalidName):
        reader(**options)


def test_a_channel_of_a_pipeline_has_its_number_of_shards(redis_client: redis.Redis) -> None:
    assert LogGroup(redis_client, Log("work", shards=3), "mailers").options.shards == 3
    assert LogGroup(redis_client, Log("work", shards=3), "mailers", shards=7).options.shards == 7


def test_an_argument_out_of_range_is_refused(reader: Reader) -> None:
    group = reader()
    some: Any = "7"
    calls: list[tuple[str, Callable[[], object]]] = [
        ("count", lambda: group.read(0)),
        ("count", lambda: group.read(1001)),
        ("count", lambda: group.read(True)),
        ("count", lambda: group.read(some)),
        ("offsets", lambda: group.acknowledge_offsets(0, (5, 4))),
        ("offsets", lambda: group.acknowledge_offsets(0, 0)),
        ("offsets", lambda: group.acknowledge_offsets(0, True)),
        ("offsets", lambda: group.acknowledge_offsets(0, some)),
        ("offsets", lambda: group.acknowledge_offsets(0, (1, some))),
        ("shard", lambda: group.acknowledge_offsets(1, 1)),
        ("shard", lambda: group.acknowledge_offsets(False, 1)),
        ("shard", lambda: group.rewind(1, "first")),
        ("to", lambda: group.rewind(0, some)),
        ("to", lambda: group.rewind(0, -1)),
        ("to", lambda: group.rewind(0, True)),
    ]
    for field, call in calls:
        with pytest.raises(InvalidLogCall) as refused:
            call()
        assert refused.value.field == field


@pytest.mark.parametrize(
    ("begun_at", "first", "tail", "pending", "due", "available"),
    [
        (None, 1, 0, 0, 0, (0, 0)),
        (None, 0, 3, 0, 0, (3, 3)),  # of a log that is empty
        (None, 3, 4, 0, 0, (2, 2)),
        (5, 1, 4, 0, 0, (0, 0)),
        (5, 1, 3, 0, 0, (0, 0)),  # it has lost its end
        (5, 1, 5, 0, 0, (1, 1)),
        (5, 1, 9, 2, 1, (5, 2)),
        (5, 1, 9, 3, 3, (5, 3)),
        (5, 1, 9, 4, 4, (5, 4)),  # the limit was lowered
    ],
)
def test_a_read_takes_what_is_due_and_new_records_up_to_the_limit(
    begun_at: int | None, first: int, tail: int, pending: int, due: int, available: tuple[int, int]
) -> None:
    counts = (0,) * 5
    offset = None if begun_at is None else Offset(begun_at)
    state = GroupState(offset, Offset(first), Offset(tail), pending, due, None, *counts)

    assert (state.available(None), state.available(3)) == available
