"""What a publisher asks Redis for before it sends a batch, beside the same in plain Python: when, for how much, and what is under way."""

from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import ceil

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.sent import listen
from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Batch
from penstock.channels.routing import log_keys
from penstock.database.registry import RegisteredChannel
from penstock.errors import ForeignLog, PenstockError
from penstock.records import DEFAULT_SCOPE, Epoch, Offset, Shard, ShardName
from penstock.streaming.memory_budgets import MemoryBudgets

ONE, OTHER = ShardName("things", Shard(0)), ShardName("things", Shard(1))


def registered(memory: int | None, name: str = "things") -> dict[str, RegisteredChannel]:
    """A channel of two shards, each of which has half of the memory."""
    return {name: RegisteredChannel(name, "log", 2, timedelta(0), redis_memory=memory)}


def make(shard: ShardName, first: int, lengths: tuple[int, ...], *, plain: bool) -> Batch:
    rows = [(first + n, "k" * (n + 1), "a", "o", "x" * length, "", 1) for n, length in enumerate(lengths)]
    return Batch(shard, Epoch(1), Offset(first), True, Columns.pack(rows), plain=plain)


def most_memory(lengths: tuple[int, ...], *, plain: bool) -> int:
    """A quarter more than the values and what is around them; what all records share is stored once, or in each entry."""
    count = len(lengths)
    keys = sum(len('"k"') + n for n in range(count)) + count - 1
    data = sum(lengths) + count - 1 if len({*lengths}) > 1 else lengths[0] * (count if plain else 1)
    shared = len('0"a""o"0') * (count if plain else 1)  # id, action, object and time
    return ceil(1.25 * (keys + data + shared + (64 * count if plain else 0))) + 256


@dataclass
class Known:
    """A shard, as a publisher knows it.  Nothing is ever appended: what the server counts is what is under way."""

    tail: int = 0
    bytes: int = 0
    underway: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))

    def send(self, part: int, first: int, last: int, size: int) -> list[int] | None:
        """The arguments of the question; None if there is none."""
        asked = None
        if first != self.tail + 1 or self.bytes == 0 or self.bytes + size > part:
            asked = [part - size, part - max(size, part // 8), *(number for each in self.underway for number in each)]
            self.bytes = sum(bytes_ for _, bytes_ in self.underway)
        self.tail, self.bytes = last, self.bytes + size
        self.underway.append((last, size))
        return asked


def ask(redis_url: str, budgets: MemoryBudgets, batch: Batch) -> list[list[int]]:
    sent = listen(redis_url, "log/make_room", partial(budgets.make_room, batch))
    return [[int(each["max_bytes"]), int(each["goal"]), *map(int, each["items"])] for each in sent]


BATCHES = st.tuples(
    st.sampled_from([ONE, OTHER]), st.lists(st.integers(1, 400), min_size=1, max_size=3).map(tuple), st.integers(0, 9)
)


@pytest.mark.slow
@settings(derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.booleans(), st.integers(1000, 20_000), st.lists(BATCHES, min_size=3, max_size=20))
def test_a_publisher_asks_when_the_sum_reaches_the_budget_or_another_has_appended(
    redis_url: str,
    redis_client: redis.Redis,
    plain: bool,  # noqa: FBT001
    memory: int,
    batches: list[tuple[ShardName, tuple[int, ...], int]],
) -> None:
    budgets = MemoryBudgets(redis_client, DEFAULT_SCOPE)
    budgets.update(registered(memory) | registered(None, "others"))
    known = {ONE: Known(), OTHER: Known()}
    for shard, lengths, gap in batches:
        model = known[shard]
        first = model.tail + 1 + (1 if gap == 0 else 0)  # another publisher's record is between
        expected = model.send(memory // 2, first, first + len(lengths) - 1, most_memory(lengths, plain=plain))
        assert ask(redis_url, budgets, make(shard, first, lengths, plain=plain)) == ([expected] if expected else [])
    assert ask(redis_url, budgets, make(ShardName("others", Shard(0)), 1, (9,), plain=plain)) == []


@pytest.mark.parametrize(("beyond", "asks"), [(-1, True), (0, False), (1, False)])
def test_a_budget_may_be_reached_exactly(
    beyond: int,
    asks: bool,  # noqa: FBT001
    redis_url: str,
    redis_client: redis.Redis,
) -> None:
    size = most_memory((100,), plain=False)
    budgets = MemoryBudgets(redis_client, DEFAULT_SCOPE)
    budgets.update(registered(2 * (3 * size + beyond)))

    sent = [bool(ask(redis_url, budgets, make(ONE, first, (100,), plain=False))) for first in (1, 2, 3)]
    assert sent == [True, False, asks]


def test_a_new_budget_holds_at_once_and_a_smaller_one_is_kept_by_retention_until_it_is(
    redis_client: redis.Redis,
) -> None:
    """A shard whose keys cannot be used now is asked again, and the others are not."""
    budgets, failed = MemoryBudgets(redis_client, DEFAULT_SCOPE), list[tuple[ShardName, type[PenstockError]]]()
    stream = log_keys("penstock", OTHER).stream

    def keep(memory: int | None, shards: tuple[ShardName, ...] = (ONE, OTHER)) -> int:
        budgets.update(registered(memory))
        redis_client.config_resetstat()
        budgets.keep(shards, lambda shard, error: failed.append((shard, type(error))))
        return int(redis_client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])

    redis_client.set(stream, "of another type")
    assert keep(10_000) > 0
    assert failed == [(OTHER, ForeignLog)]
    assert keep(10_000, (ONE,)) == 0
    redis_client.delete(stream)
    assert [keep(10_000), keep(10_000), keep(10_002), keep(10_001), keep(10_000), keep(9_999)] == [1, 0, 0, 2, 0, 2]
    assert len(failed) == 1
    redis_client.set(stream, "of another type")
    assert keep(9_000) > keep(None) == 0, "nobody keeps a budget that has gone"
