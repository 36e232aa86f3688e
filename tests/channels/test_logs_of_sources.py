"""The log of a source is read by its name, ``orders@eu``; one of several sources has nothing to read by itself."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis

from channels.groups.conftest import GroupedLog
from fixtures.clients import connect_redis, connect_redis_async
from penstock import Log
from penstock.clients import AsyncLogGroup, AsyncLogReader, LogGroup, LogReader
from penstock.errors import DeclarationError

LOGS = ["orders@eu", Log("orders", shards=1, source="eu")]


@pytest.fixture
def source_log(redis_client: redis.Redis, redis_url: str) -> None:
    with connect_redis(redis_url) as client:
        GroupedLog(client, "orders@eu").append(3)


@pytest.mark.parametrize("named", LOGS, ids=["name", "channel"])
def test_the_log_of_a_source_is_read(source_log: None, redis_url: str, named: Log | str) -> None:
    with LogReader.connect(redis_url, named) as reader:
        assert [record.channel for record in reader.read().records] == ["orders@eu"] * 3
    with LogGroup.connect(redis_url, named, "mailers", retry_s=60) as group:
        taken = group.read()
        assert [record.source for record in taken] == ["eu"] * 3
        assert group.acknowledge(taken) == 3


@pytest.mark.parametrize("named", LOGS, ids=["name", "channel"])
def test_the_log_of_a_source_is_read_by_asyncio(source_log: None, redis_url: str, named: Log | str) -> None:
    async def story() -> None:
        reader = AsyncLogReader.connect(redis_url, named)
        assert len(await reader.read()) == 3
        await reader.aclose()
        group = AsyncLogGroup.connect(redis_url, named, "mailers")
        assert len(await group.read()) == 3
        await group.aclose()

    asyncio.run(story())


@pytest.mark.parametrize(
    "kind", [LogReader, AsyncLogReader, partial(LogGroup, group="g"), partial(AsyncLogGroup, group="g")]
)
def test_a_log_of_several_sources_is_refused_with_the_remedy(
    redis_client: redis.Redis, redis_url: str, kind: Callable[..., Any]
) -> None:
    """Its own shards never exist: a reader would wait for ever."""
    client = connect_redis_async(redis_url)
    with pytest.raises(DeclarationError, match=r"sources eu, us.*'orders@eu'"):
        kind(client, log=Log("orders", sources=["eu", "us"]))
