"""Reads, acknowledgements, rewinds and evictions in any order, packed and plain, beside a plain model; and many readers at once."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from channels.groups.conftest import CURSOR, GroupedLog, Reader
from penstock.channels.log.streams import evict, extents
from penstock.clients import LogGroup
from penstock.errors import Gap
from penstock.records import Offset, Shard, ShardName
from penstock.testing import eventually

SHARD = ShardName("work", Shard(0))
MOST = 12


class Model(RuleBasedStateMachine):
    """A log, and a group that acknowledges: its cursor, and what is pending."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.log = GroupedLog(self.client)
        self.group = LogGroup(self.client, "work", "mailers", retry_s=3600, max_pending=MOST)
        self.skipping = LogGroup(self.client, "work", "mailers", retry_s=3600, max_pending=MOST, evicted="skip")
        self.first, self.tail, self.cursor = 1, 0, 1
        self.pending: set[int] = set()
        self.missed = 0
        self.is_fresh = False
        self.group.rewind(0, 1)

    @rule(count=st.integers(1, 9), plain=st.booleans())
    def append(self, *, count: int, plain: bool) -> None:
        self.log.plain = plain
        self.log.append(count, first=self.tail + 1)
        self.tail += count

    @rule(before=st.integers(1, 60))
    def evict(self, before: int) -> None:
        evict(self.client, "penstock", SHARD, Offset(min(before, self.tail + 1)))
        self.first = extents(self.client, "penstock", [SHARD])[SHARD].first

    @rule(count=st.integers(1, 20), skips=st.booleans())
    def read(self, *, count: int, skips: bool) -> None:
        room = min(count, MOST - len(self.pending))
        begin = max(self.cursor, self.first) if room else self.cursor
        if self.is_fresh and self.first == 1:  # nothing was evicted
            self.cursor = begin
        if room and begin > self.cursor and not skips:
            with pytest.raises(Gap):
                self.group.read(count)
            return
        taken = (self.skipping if skips else self.group).read(count)
        expected = [*range(begin, min(self.tail, begin + room - 1) + 1)]
        assert taken.records.offsets == expected
        assert set(taken.deliveries) <= {1}
        assert [(each.first, each.last) for each in taken.missed] == (
            [(self.cursor, begin - 1)] if begin > self.cursor else []
        )
        self.missed += begin - self.cursor
        self.is_fresh = self.is_fresh and not self.tail
        self.cursor = begin + len(expected)
        self.pending |= set(expected)

    @rule(ranges=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30)), max_size=3))
    def acknowledge(self, ranges: list[tuple[int, int]]) -> None:
        named = {n for first, more in ranges for n in range(first, first + more + 1)}
        done = self.group.acknowledge_offsets(0, *((first, first + more) for first, more in ranges))
        assert done == len(named & self.pending)
        self.pending -= named

    @rule(to=st.integers(1, 60) | st.sampled_from(["first", "last"]))
    def rewind(self, to: int | str) -> None:
        ends = {"first": self.first, "last": self.tail + 1}
        self.cursor = ends[to] if isinstance(to, str) else to
        self.is_fresh = isinstance(to, str) and self.tail == 0
        assert self.group.rewind(0, to) == self.cursor  # type: ignore[arg-type]  # drawn
        self.pending = {offset for offset in self.pending if offset < self.cursor}

    @invariant()
    def the_state_is_the_models(self) -> None:
        [state] = self.group.states().values()
        assert (state.next_offset, state.pending, state.missed, state.due) == (
            self.cursor,
            len(self.pending),
            self.missed,
            0,
        )
        assert (state.first, state.tail) == (self.first, self.tail)
        unread = max(0, self.tail - self.cursor + 1)
        assert [state.available(most) for most in (None, MOST, 3)] == [
            unread,
            *(min(unread, max(0, most - len(self.pending))) for most in (MOST, 3)),
        ]


def check(client: redis.Redis, *, examples: int) -> None:
    class Checked(Model):
        pass

    Checked.client = client
    run_state_machine_as_test(Checked, settings=settings(max_examples=examples, stateful_step_count=30))


def test_a_group_does_what_the_model_does(redis_client: redis.Redis) -> None:
    check(redis_client, examples=10)


@pytest.mark.storm
@pytest.mark.timeout(1200)
def test_a_group_does_it_over_many_runs(redis_client: redis.Redis) -> None:
    check(redis_client, examples=300)


@pytest.mark.usefixtures("in_turn")
def test_many_readers_at_once_get_each_record_once(
    packed: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """Without acknowledgement: none is delivered twice, none is left out, and nobody goes without."""
    readers = [reader() for _ in range(4)]
    seen: list[list[int]] = [[] for _ in readers]

    def read(of: LogGroup, own: list[int]) -> None:
        while sum(map(len, seen)) < 400:
            own += of.read(7, block_s=0.2).records.offsets

    with ThreadPoolExecutor(len(readers)) as pool:
        futures = [pool.submit(read, *each) for each in zip(readers, seen, strict=True)]
        eventually(lambda: redis_client.zcard(f"{CURSOR}:places") == 4, "all of them wait")
        for _ in range(40):
            packed.append(10)
        for each in futures:
            each.result(60)

    assert Counter(offset for each in seen for offset in each) == Counter(range(1, 401))
    assert min(map(len, seen)) > 0
