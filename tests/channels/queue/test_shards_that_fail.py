"""Readers of a queue in several shards: an error in one of them is not lost, and does not stop the others."""

import asyncio
import inspect
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
import redis

from fixtures.constants import SetConstants
from penstock.channels.routing import queue_keys
from penstock.clients import AsyncFairQueue, FairQueue
from penstock.errors import ForeignQueue, PenstockError
from penstock.records import Shard, ShardName
from penstock.testing import eventually

SHARDS, BAD = 4, 2


class Face:
    """The sync or the async face of a queue, called the same way."""

    def __init__(self, runner: asyncio.Runner, queue: Any) -> None:
        self.runner, self.queue = runner, queue

    def call(self, function: Any, *args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        return self.runner.run(result) if inspect.iscoroutine(result) else result

    def reader(self, **options: Any) -> Any:
        return self.queue.reader(**options)

    def close_reader(self, reader: Any) -> None:
        self.call(reader.close if hasattr(reader, "close") else reader.aclose)


@pytest.fixture(params=["sync", "async"])
def face(request: pytest.FixtureRequest, redis_client: redis.Redis, redis_url: str) -> Iterator[Face]:
    with asyncio.Runner() as runner:
        if request.param == "sync":
            yield Face(runner, FairQueue(redis_client, "jobs", shards=SHARDS))
        else:
            queue = AsyncFairQueue.connect(redis_url, "jobs", shards=SHARDS)
            yield Face(runner, queue)
            runner.run(queue.aclose())


@pytest.fixture
def written(redis_client: redis.Redis) -> set[str]:
    """Payloads in shards other than the one that is spoiled; each names its shard."""
    queue, seen = FairQueue(redis_client, "jobs", shards=SHARDS), set()
    for number in range(40):
        tenant = f"t{number}"
        if queue._shape.shard_for(tenant).number != BAD:
            seen.add(tenant)
        queue.write(tenant, tenant)
    return seen


def spoil(client: redis.Redis, name: str = "q-messages") -> None:
    key = queue_keys("penstock", ShardName("jobs", Shard(BAD))).root + name
    client.delete(key)
    client.set(key, "somebody's")


@pytest.mark.parametrize("name", ["q-meta", "q-messages", "q-wakes", "q-ready"])
def test_the_messages_of_the_others_come_and_the_error_once_there_are_none(
    name: str, face: Face, written: set[str], redis_client: redis.Redis
) -> None:
    spoil(redis_client, name)
    reader = face.reader()
    read: set[str] = set()
    while read < written:
        leases = face.call(reader.read, 7)
        assert leases
        read |= {lease.message.payload.decode() for lease in leases}
        face.call(reader.done, leases)
    began = monotonic()
    with pytest.raises(ForeignQueue, match=f"jobs/{BAD}"):
        face.call(reader.read, 7, block_s=60)
    assert monotonic() - began < 50

    face.call(face.queue.write, next(iter(written)), "more")
    [lease] = face.call(reader.read, 7, block_s=60)
    assert lease.message.payload == b"more"
    face.close_reader(reader)


def test_the_shard_is_tried_again_and_its_error_is_noted_each_time(
    face: Face, written: set[str], redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    assert written
    set_constants("channels.queue.rounds", MAX_WAIT_S=0.1)
    set_constants("channels.isolation", RETRY_EVERY_S=0.1)
    key = queue_keys("penstock", ShardName("jobs", Shard(BAD))).root + "q-waiting"
    redis_client.rename(key, "kept")
    redis_client.set(key, "somebody's")
    noted: list[tuple[int, PenstockError]] = []
    reader = face.reader(on_error=lambda number, error: noted.append((number, error)))
    face.call(reader.done, face.call(reader.read, 100))
    assert face.call(reader.read, 100, block_s=0.4) == []
    assert 2 <= len(noted) <= 6
    assert {(number, type(error)) for number, error in noted} == {(BAD, ForeignQueue)}

    redis_client.rename("kept", key)
    assert {each.message.shard for each in face.call(reader.read, 100, block_s=60)} == {BAD}
    face.close_reader(reader)


def test_leases_of_the_others_are_settled_and_given_back(
    face: Face, written: set[str], redis_client: redis.Redis
) -> None:
    reader = face.reader()
    leases = face.call(reader.read, 100)
    spoil(redis_client, "q-meta")
    some = [*leases[::2]]
    with pytest.raises(ForeignQueue, match=f"jobs/{BAD}"):
        face.call(reader.done, some)
    assert {each.message.shard for each in reader._book.all()} == set(range(SHARDS))
    with pytest.raises(ForeignQueue):
        face.close_reader(reader)

    done = {each.message.payload.decode() for each in some}
    other = FairQueue(redis_client, "jobs", shards=SHARDS).reader()
    left = {each.message.payload.decode() for each in other.read(100)}
    assert left == written - done
    with pytest.raises(ForeignQueue):  # not lost, though there was something to read
        other.read(1)
    other.close()


def test_leases_of_the_others_are_kept_alive(face: Face, written: set[str], redis_client: redis.Redis) -> None:
    reader = face.reader(lease_s=1.0)
    leases = face.call(reader.read, 100)
    kept = [lease for lease in leases if lease.message.shard != BAD]
    first = ends_of_leases(redis_client)
    spoil(redis_client, "q-messages")
    eventually(lambda: min(ends_of_leases(redis_client)) > max(first), "all were made longer")
    assert all(face.call(reader.done, kept))
    assert len(kept) == len(written)
    with pytest.raises(ForeignQueue):
        face.close_reader(reader)


def ends_of_leases(client: redis.Redis) -> list[float]:
    """When the leases of the other shards end."""
    ends: list[float] = []
    for number in {*range(SHARDS)} - {BAD}:
        root = queue_keys("penstock", ShardName("jobs", Shard(number))).root
        leases: Any = client.zrange(f"{root}q-leases", 0, -1, withscores=True)
        ends += [end for _, end in leases]
    return ends


def test_all_shards_fail(face: Face, redis_client: redis.Redis) -> None:
    for number in range(SHARDS):
        key = queue_keys("penstock", ShardName("jobs", Shard(number))).root + "q-meta"
        redis_client.set(key, "somebody's")
    reader, seen = face.reader(), []
    for _ in range(SHARDS):
        with pytest.raises(ForeignQueue) as raised:
            face.call(reader.read)
        seen.append(str(raised.value))
    assert len(set(seen)) == SHARDS
    began = monotonic()
    assert face.call(reader.read, block_s=0.1) == []
    assert monotonic() - began >= 0.1
    face.close_reader(reader)
