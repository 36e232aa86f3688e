"""A log without a pipeline, of packed and of plain entries, and readers of a group of it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.constants import SetConstants
from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Appended, Batch
from penstock.channels.log.appending import append_together
from penstock.channels.routing import log_keys
from penstock.clients import LogGroup
from penstock.records import Epoch, Offset, Record, Shard, ShardName

CURSOR = "penstock:{work/0}:group:mailers"


class GroupedLog:
    """Writes records as a streamer does."""

    def __init__(self, client: Any, name: str = "work", *, plain: bool = False) -> None:
        self.client, self.name, self.plain = client, name, plain
        self._tails: dict[int, int] = {}

    def stream(self, shard: int = 0) -> str:
        return log_keys("penstock", ShardName(self.name, Shard(shard))).stream

    def append(self, count: int, *, shard: int = 0, **of: Any) -> range:
        """Appends a batch; returns its offsets.  ``first``, ``epoch``, ``begins``, ``staged``, ``data`` are the batch's."""
        first = of.get("first", self._tails.get(shard, 0) + 1)
        offsets = range(first, first + count)
        rows = [
            (n, f"k{n}", "insert", "thing", of.get("data", f'{{"n": {n}}}'), "", of.get("staged", 5)) for n in offsets
        ]
        batch = Batch(
            ShardName(self.name, Shard(shard)),
            Epoch(of.get("epoch", 1)),
            Offset(first),
            begins=of.get("begins", False),
            columns=Columns.pack(rows),
            plain=self.plain,
        )
        [(_, reply)] = append_together(self.client, "penstock", [batch])
        assert isinstance(reply, Appended), reply
        self._tails[shard] = offsets[-1]
        return offsets


@pytest.fixture(params=["packed", "plain"])
def work(redis_client: redis.Redis, redis_url: str, request: pytest.FixtureRequest) -> Iterator[GroupedLog]:
    """A log whose entries hold a batch, or a record each."""
    with connect_redis(redis_url) as client:
        yield GroupedLog(client, plain=request.param == "plain")


@pytest.fixture
def packed(redis_client: redis.Redis, redis_url: str) -> Iterator[GroupedLog]:
    """A log whose entries hold a batch each."""
    with connect_redis(redis_url) as client:
        yield GroupedLog(client)


@pytest.fixture
def in_turn(set_constants: SetConstants) -> None:
    """A reader that the machine keeps busy for a while is not passed over by the others."""
    set_constants("structures.turns", GRACE_S=60.0, VALID_MS=600_000)


Reader = Callable[..., LogGroup]


@pytest.fixture
def reader(redis_url: str, request: pytest.FixtureRequest) -> Iterator[Reader]:
    """Makes readers of the group ``mailers``; the log of plain entries has a second shard, which is empty."""
    made: list[LogGroup] = []
    shards = 2 if "plain" in request.node.name else 1

    def make(group: str = "mailers", log: str = "work", **options: Any) -> LogGroup:
        made.append(LogGroup.connect(redis_url, log, group, **{"shards": shards, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def offsets(records: Sequence[Record]) -> list[int]:
    return [record.offset for record in records]


def waiting(client: redis.Redis) -> int:
    return client.zcard(f"{CURSOR}:places")
