"""A follower beside what its logs hold: entries of any size, records that are taken in part, reads ahead, evictions."""

from typing import Any

import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Appended, Batch
from penstock.channels.log.appending import append_together
from penstock.channels.log.follower import Follower
from penstock.channels.log.streams import evict, extents, last_offsets, shards_with_more
from penstock.records import BEGINNING, Epoch, Offset, Shard, ShardName

SHARDS = [ShardName("things", Shard(number)) for number in range(3)]
COUNT = 5
WHICH = st.integers(0, 2)
AHEAD = st.dictionaries(WHICH, st.sampled_from([0, 2]), min_size=1)


class Following(RuleBasedStateMachine):
    """Two shards with packed entries, one with plain ones."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.follower = Follower(self.client, "penstock", count=COUNT)
        self.tails = dict.fromkeys(SHARDS, 0)
        self.firsts = dict.fromkeys(SHARDS, 1)
        self.positions = dict.fromkeys(SHARDS, BEGINNING)

    @rule(which=WHICH, sizes=st.lists(st.sampled_from([1, 1, 2, 4, 13]), min_size=1, max_size=12))
    def append(self, which: int, sizes: list[int]) -> None:
        shard = SHARDS[which]
        for size in sizes:
            first = self.tails[shard] + 1
            rows = [(offset, "k", "insert", "thing", str(offset), "", offset) for offset in range(first, first + size)]
            batch = Batch(shard, Epoch(1), Offset(first), first == 1, Columns.pack(rows), plain=which == 2)
            [(_, reply)] = append_together(self.client, "penstock", [batch])
            assert reply == Appended(Offset(first + size - 1), size)
            self.tails[shard] += size

    @rule(which=WHICH, before=st.integers(1, 60))
    def evict(self, which: int, before: int) -> None:
        evict(self.client, "penstock", SHARDS[which], Offset(before))
        extent = extents(self.client, "penstock", [SHARDS[which]])[SHARDS[which]]
        assert extent.records == len(range(extent.first, self.tails[SHARDS[which]] + 1))
        self.firsts[SHARDS[which]] = extent.first

    @rule(
        takes=st.tuples(*[st.integers(0, COUNT)] * 3),
        of=st.sets(WHICH, min_size=1),
        ahead=st.just([]) | st.lists(AHEAD, min_size=1, max_size=2),
    )
    def wait(self, takes: tuple[int, ...], of: set[int], ahead: list[dict[int, int]]) -> None:
        """Reads, and takes some of what comes: a worker's batch may be smaller, and its transaction may fail.

        What was requested ahead may be for other shards and positions, which are not those that it reads from.
        """
        for beyond in ahead:
            self.follower.request_ahead({SHARDS[w]: Offset(self.positions[SHARDS[w]] + n) for w, n in beyond.items()})
        positions = {SHARDS[which]: self.positions[SHARDS[which]] for which in of}
        found = self.follower.wait(positions, None)
        assert all(self.tails[shard] > self.positions[shard] for shard in found)
        more = {s for s in positions if self.tails[s] > max(self.positions[s], self.firsts[s] - 1)}
        assert found or not more  # what was read before may have been evicted since
        for shard, records in found.items():
            begin = max(self.positions[shard] + 1, min(records.offsets))
            if begin > self.positions[shard] + 1:  # what was read before is not evicted from the follower
                assert begin == self.firsts[shard]
            assert records.offsets == [*range(begin, begin + len(records))]
            assert 1 <= len(records) <= COUNT
            assert [r.data for r in records] == records.offsets
            if taken := records.offsets[: takes[SHARDS.index(shard)]]:
                self.positions[shard] = taken[-1]

    @rule(which=WHICH, back=st.integers(0, 9))
    def go_back(self, which: int, back: int) -> None:
        """As after a failed batch, or a reset of the consumer."""
        self.positions[SHARDS[which]] = Offset(max(0, self.positions[SHARDS[which]] - back))

    @rule()
    def close(self) -> None:
        self.follower.close()

    @invariant()
    def the_ends_are_known(self) -> None:
        assert last_offsets(self.client, "penstock", SHARDS) == self.tails
        more = [s for s in SHARDS if self.tails[s] > max(self.positions[s], self.firsts[s] - 1)]
        assert shards_with_more(self.client, "penstock", self.positions) == more

    def teardown(self) -> None:
        """In the end, everything that is left is read, once and in order."""
        rounds = 0
        while found := self.follower.wait(self.positions, None):
            self.positions |= {shard: records.offsets[-1] for shard, records in found.items()}
            rounds += 1
            assert rounds <= 400
        for shard in SHARDS:
            assert self.positions[shard] == self.tails[shard] or self.firsts[shard] == self.tails[shard] + 1
        self.follower.close()


def test_a_follower_returns_what_comes_next_however_it_is_read(redis_client: redis.Redis) -> None:
    """Guarantees 9 and 12: nothing is left out, and nothing returned for another position."""
    machine: Any = type("Checked", (Following,), {"client": redis_client})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30))
