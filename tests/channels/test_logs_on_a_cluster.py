"""A log in shards on several nodes is written, read and waited for, also by asyncio."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from fixtures.constants import SetConstants
from fixtures.topologies import Cluster
from penstock.clients import AsyncLogReader, AsyncLogWriter, LogReader, LogWriter

SHARDS = 6


def test_a_log_on_several_nodes_is_written_and_read(cluster: Cluster) -> None:
    with (
        LogWriter.connect(cluster.url, "rides", shards=SHARDS) as writer,
        LogReader.connect(cluster.url, "rides", shards=SHARDS) as reader,
    ):
        for shard in range(SHARDS):
            writer.append([shard, "more"], shard=shard)
        found = reader.read_any(dict.fromkeys(range(SHARDS), 1))
        assert {shard: each[0].data for shard, each in found.items() if each[0]} == {
            shard: shard for shard in range(SHARDS)
        }

        with ThreadPoolExecutor() as pool:
            ends = dict.fromkeys(range(SHARDS), 3)
            reading = pool.submit(reader.read_any, ends, block_s=30)
            writer.append(["late"], shard=4)
            woken = reading.result(10)
        assert {shard: each.records[0].data for shard, each in woken.items()} == {4: "late"}

        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(reader.read, 5, 3, block_s=30)
            writer.append(["later"], shard=5)
            assert waiting.result(10).records[0].data == "later"
        assert writer.evict(2, keep=0).available == 3


def test_a_log_on_several_nodes_is_written_and_read_by_asyncio(cluster: Cluster, set_constants: SetConstants) -> None:
    set_constants("channels.log.log_reader", MAX_WAIT_S=60)

    async def story() -> None:
        writer = AsyncLogWriter.connect(cluster.url, "rides", shards=SHARDS)
        reader = AsyncLogReader.connect(cluster.url, "rides", shards=SHARDS)
        for shard in range(SHARDS):
            await writer.append([shard], shard=shard)
        assert len(await reader.read_any(dict.fromkeys(range(SHARDS), 1))) == SHARDS

        ends = dict.fromkeys(range(SHARDS), 2)
        reading = asyncio.create_task(reader.read_any(ends, block_s=30))
        await asyncio.sleep(0.1)
        await writer.append(["late"], shard=4)
        assert [*await asyncio.wait_for(reading, 10)] == [4]
        waiting = asyncio.create_task(reader.read(5, 2, block_s=30))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=2)
        assert waiting.cancelled()
        assert (await reader.info(5)).last == 1
        await writer.aclose()
        await reader.aclose()

    asyncio.run(story())
