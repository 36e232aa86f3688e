"""A log that was resharded has more shards than a reader may know: it is refused, and leaves none out."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from channels.groups.conftest import GroupedLog, Reader
from fixtures.constants import SetConstants
from fixtures.logs import Driven
from penstock import Log
from penstock.clients import AsyncLogGroup, AsyncLogReader, LogGroup, LogReader
from penstock.errors import ForeignLog, InvalidLogCall

MakeRead = Callable[..., Any]


@pytest.fixture
def resharded(packed: GroupedLog) -> GroupedLog:
    """A log that had two shards, and then three; the last one is the first with a record of that generation."""
    for shard in (0, 1, 4):
        packed.append(1, shard=shard)
    return packed


@pytest.fixture(params=[LogReader, AsyncLogReader, LogGroup, AsyncLogGroup])
def make_read(redis_url: str, request: pytest.FixtureRequest) -> Iterator[MakeRead]:
    """Makes the ``read`` of a reader, or of one of a group, of the log ``work``."""
    kind, made = request.param, []
    runner = asyncio.Runner()

    def make(log: Log | str = "work", **options: Any) -> Any:
        named = (log, "mailers") if "Group" in kind.__name__ else (log,)
        each = kind.connect(redis_url, *named, **options)
        made.append(Driven(runner, each) if "Async" in kind.__name__ else each)
        return made[-1].read

    yield make
    for each in made:
        (each.aclose if isinstance(each, Driven) else each.close)()
    runner.close()


def test_a_channel_with_too_few_shards_is_refused_at_the_first_read(resharded: GroupedLog, make_read: MakeRead) -> None:
    read = make_read(Log("work", shards=2))
    for _ in "ab":
        with pytest.raises(InvalidLogCall, match="is 2, and Redis has work/4"):
            read()
    with pytest.raises(InvalidLogCall):
        make_read(Log("work", shards=3), shards=4)()
    assert make_read(Log("work", shards=3), shards=5)()


def test_a_log_of_an_own_namespace_is_looked_up_there(resharded: GroupedLog, make_read: MakeRead) -> None:
    assert not make_read(Log("work", shards=2), namespace="other")()


def test_a_group_is_refused_by_name_too(resharded: GroupedLog, reader: Reader) -> None:
    with pytest.raises(InvalidLogCall, match="is 1, and Redis has work/1, work/4"):
        reader().read()


def test_a_reader_of_a_name_may_read_a_part(resharded: GroupedLog, redis_url: str) -> None:
    with LogReader.connect(redis_url, "work") as reader:
        assert len(reader.read()) == 1


def test_a_group_that_reads_notices_that_the_log_is_resharded(
    resharded: GroupedLog, reader: Reader, set_constants: SetConstants
) -> None:
    set_constants("structures.turns", CHECK_S=0)
    group = reader(shards=5)
    assert len(group.read()) == 3
    resharded.append(1, shard=5)
    resharded.append(1, shard=0)
    with pytest.raises(InvalidLogCall, match="work/5"):
        group.read()
    assert len(reader(shards=6).read()) == 2, "the refused read has taken nothing"


def test_a_key_of_another_type_is_foreign(
    resharded: GroupedLog, make_read: MakeRead, redis_client: redis.Redis
) -> None:
    redis_client.delete("penstock:{work/4}:epoch")
    redis_client.hset("penstock:{work/4}:epoch", "a", "b")
    with pytest.raises(ForeignLog):
        make_read(Log("work", shards=2))()
