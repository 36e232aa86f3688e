"""What asks several shards at once sends one request, with asyncio as without; and a wait on a Cluster asks little."""

import asyncio
from typing import Any

import pytest
import redis
from redis.asyncio.connection import AbstractConnection

from fixtures.clients import connect_redis_async
from fixtures.topologies import Cluster
from penstock.channels.driving import drive_async
from penstock.channels.scripts import Call, script
from penstock.clients import AsyncLogGroup, AsyncLogReader, LogReader, LogWriter
from penstock.errors import ForeignLog

SHARDS = 6


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with each request of asyncio."""
    counted: list[object] = []
    send = AbstractConnection.send_packed_command

    async def count(self: Any, command: Any, *args: Any, **options: Any) -> None:
        counted.append(command)
        await send(self, command, *args, **options)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", count)
    return counted


def test_shards_are_asked_in_one_round_trip(redis_url: str, redis_client: redis.Redis, sends: list[object]) -> None:
    with LogWriter.connect(redis_url, "rides", shards=SHARDS) as writer:
        for shard in range(SHARDS):
            writer.append([shard], shard=shard)

    async def story() -> None:
        reader = AsyncLogReader.connect(redis_url, "rides", shards=SHARDS)
        group = AsyncLogGroup.connect(redis_url, "rides", "mailers", shards=SHARDS)
        everywhere = dict.fromkeys(range(SHARDS), 1)
        assert len(await reader.read_any(everywhere)) == SHARDS
        assert len(await group.states()) == SHARDS
        sends.clear()
        assert len(await reader.read_any(everywhere)) == SHARDS
        assert len(await group.states()) == SHARDS
        await reader.aclose()
        await group.aclose()

    asyncio.run(story())
    assert len(sends) == 2


def test_a_script_that_the_server_has_lost_is_loaded_again(redis_url: str, redis_client: redis.Redis) -> None:
    redis_client.script_flush()
    keys = ("penstock:{c}:volatile", "penstock:{c}:volatile-times")

    async def story() -> list[Any]:
        client = connect_redis_async(redis_url)
        replies = await drive_async(client, script("volatile/count").steps([Call(keys, ())] * 3))
        await client.aclose()
        return replies

    assert asyncio.run(story()) == [script("volatile/count").call_each(redis_client, [Call(keys, ())])[0]] * 3


def test_the_error_of_one_of_several_shards_is_raised(redis_url: str, redis_client: redis.Redis) -> None:
    redis_client.set("penstock:{rides/1}:log", "x")

    async def story() -> None:
        reader = AsyncLogReader.connect(redis_url, "rides", shards=2)
        try:
            await reader.read_any({0: 1, 1: 1})
        finally:
            await reader.aclose()

    with pytest.raises(ForeignLog, match="another type"):
        asyncio.run(story())


def _script_calls(client: Any) -> int:
    stats = client.info("commandstats", target_nodes="primaries")
    return sum(each.get("cmdstat_evalsha", {"calls": 0})["calls"] for each in stats.values())


@pytest.mark.parametrize("kind", [LogReader, AsyncLogReader])
def test_a_wait_on_a_cluster_does_not_run_the_script_again_and_again(cluster: Cluster, kind: Any) -> None:
    everywhere = dict.fromkeys(range(SHARDS), 2)
    with LogWriter.connect(cluster.url, "rides", shards=SHARDS) as writer:
        for shard in range(SHARDS):
            writer.append([shard], shard=shard)
        before = _script_calls(writer._client)

        async def wait() -> dict[int, Any]:
            reader = AsyncLogReader.connect(cluster.url, "rides", shards=SHARDS)
            found = await reader.read_any(everywhere, block_s=0.8)
            await reader.aclose()
            return found

        if kind is AsyncLogReader:
            assert asyncio.run(wait()) == {}
        else:
            with LogReader.connect(cluster.url, "rides", shards=SHARDS) as reader:
                assert reader.read_any(everywhere, block_s=0.8) == {}
        assert _script_calls(writer._client) - before <= 4 * SHARDS
