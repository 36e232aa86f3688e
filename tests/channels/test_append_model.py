"""Batches that overlap, repeat and come late, packed and plain, from several publishers: the log is the journal's beginning."""

from itertools import product

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Appended, Batch, Behind, FencedOff, Foreign
from penstock.channels.log.appending import append_ahead, append_together
from penstock.channels.log.streams import evict, extents, read, read_newest
from penstock.records import BEGINNING, Epoch, Offset, Shard, ShardName

SHARD = ShardName("things", Shard(0))
SIZE = 60
OFFSETS = st.integers(1, SIZE)
STORED = st.sampled_from(["plain", "none", "zstd"])
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def journal(lineage: int) -> list[tuple[int, str, str, str, str, str, int]]:
    """The journal's records: those of another lineage have the same ids, or the same times."""
    return [
        (
            number * 3 + (lineage == 1),
            f"k{number % 7}\n",
            "insert",
            "thing",
            f"{number}",
            "",
            number // 4 + 1_000 * (lineage == 2),
        )
        for number in range(1, SIZE + 1)
    ]


OURS = journal(0)


class Model(RuleBasedStateMachine):
    """A stream, and what it should hold: the records between two offsets, and the epoch that wrote last."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.first, self.tail, self.epoch = 1, 0, 1

    def make(self, first: int, last: int, stored: str, lineage: int = 0, epoch: int = 1) -> Batch:
        columns = Columns.pack(journal(lineage)[first - 1 : last])
        made = Batch(SHARD, Epoch(epoch), Offset(first), first == 1, columns)
        return made.stored_as(stored)

    @rule(ends=st.tuples(OFFSETS, OFFSETS).map(sorted), stored=STORED, epoch=st.integers(1, 3))
    def append(self, ends: list[int], stored: str, epoch: int) -> None:
        first, last = ends
        [(_, reply)] = append_together(self.client, "penstock", [self.make(first, last, stored, epoch=epoch)])
        if epoch < self.epoch:
            assert reply == FencedOff(Epoch(self.epoch))
            return
        match reply:
            case Appended(tail, added):
                assert self.tail >= first - 1
                assert (tail, added) == (max(self.tail, last), max(0, last - self.tail))
                self.tail = max(self.tail, last)
            case Behind(tail):
                assert tail == self.tail
                assert tail < first - 1  # a hole
                return
            case _:
                raise AssertionError(reply)
        if added:
            self.epoch = epoch
        self.epoch = self.read_epoch()

    def read_epoch(self) -> int:
        return int(self.client.get("penstock:{things/0}:epoch") or 1)

    def backlog(self, stored: str, sizes: list[int]) -> list[Batch]:
        """Batches one after the other, from anywhere at or before the tail."""
        batches, first = [], max(1, self.tail - sizes[0] + 1)
        for size in sizes:
            if first <= SIZE:
                last = min(SIZE, first + size - 1)
                batches.append(self.make(first, last, stored, epoch=self.epoch))
                first = last + 1
        return batches

    @rule(stored=STORED, sizes=SIZES)
    def append_many_together(self, stored: str, sizes: list[int]) -> None:
        """All of it is there after one call, wherever the tail was."""
        batches = self.backlog(stored, sizes)
        for batch, reply in append_together(self.client, "penstock", batches):
            assert isinstance(reply, Appended), (batch, reply)
            self.tail = max(self.tail, reply.tail)
        assert self.tail >= batches[-1].last if batches else True

    @rule(stored=STORED, sizes=SIZES)
    def append_many_ahead(self, stored: str, sizes: list[int]) -> None:
        """Pipelined; what was refused is sent again in the next round."""
        for batch, reply in append_ahead(self.client, "penstock", self.backlog(stored, sizes)):
            assert isinstance(reply, Appended | Behind), (batch, reply)
            self.tail = max(self.tail, reply.tail)

    @rule(ends=st.tuples(OFFSETS, OFFSETS).map(sorted), stored=STORED, lineage=st.integers(1, 2))
    def append_other_records(self, ends: list[int], stored: str, lineage: int) -> None:
        """Another database's: refused where the log still holds what they share, and never appended over it."""
        first, last = ends
        shared = min(self.tail, last)
        if not first <= self.tail or shared < self.first:
            return
        batch = self.make(first, last, stored, lineage, epoch=self.epoch)
        [(_, reply)] = append_together(self.client, "penstock", [batch])
        assert reply == Foreign(Offset(shared), str(OURS[shared - 1][0]))

    @rule(before=OFFSETS)
    def evict(self, before: int) -> None:
        evict(self.client, "penstock", SHARD, Offset(before))
        found = extents(self.client, "penstock", [SHARD])[SHARD]
        assert found.tail == self.tail
        assert found.first <= max(self.first, min(before, self.tail + 1))  # an entry goes as a whole
        self.first = max(self.first, found.first)

    @rule(after=st.integers(0, SIZE), count=st.integers(1, SIZE))
    def reads(self, after: int, count: int) -> None:
        found = read(self.client, "penstock", SHARD, Offset(after), count)
        begin = max(after + 1, self.first)
        assert found.offsets == [*range(begin, min(self.tail, begin + count - 1) + 1)]
        newest = read_newest(self.client, "penstock", SHARD, count)
        assert newest.offsets == [*range(max(self.first, self.tail - count + 1), self.tail + 1)]

    @invariant()
    def the_log_is_the_journals(self) -> None:
        records = read(self.client, "penstock", SHARD, BEGINNING, SIZE)
        assert [(r.id, r.key, r.action, r.object, r.data_json, r.headers_json, r.staged_us) for r in records] == OURS[
            self.first - 1 : self.tail
        ]


def check(client: redis.Redis, *, examples: int, seeded: bool = False) -> None:
    class Checked(Model):
        pass

    Checked.client = client
    chosen = settings(max_examples=examples, stateful_step_count=40, derandomize=seeded)
    run_state_machine_as_test(Checked, settings=chosen)


def test_the_log_holds_the_journals_records_however_they_are_sent(redis_client: redis.Redis) -> None:
    check(redis_client, examples=15, seeded=True)


@pytest.mark.storm
@pytest.mark.timeout(1200)
def test_the_log_holds_them_over_many_runs(redis_client: redis.Redis) -> None:
    check(redis_client, examples=300)


WAYS = ("plain", "none", "zstd")
PLACES = ((1, 10), (10, 10), (10, 12), (3, 7), (7, 12), (1, 4), (4, 4), (2, 4), (5, 5), (1, 12))
"""Batches beside a log of ten records, of which the first four were sent together, and the others."""


@pytest.mark.parametrize("lineage", range(3))
@pytest.mark.parametrize("held", WAYS)
def test_the_last_record_that_a_batch_shares_with_the_log_is_compared_however_both_are_stored(
    redis_client: redis.Redis, held: str, lineage: int
) -> None:
    model = type("Sender", (Model,), {"client": redis_client})
    for sent, (first, last) in product(WAYS, PLACES):
        sender = model()
        append_together(redis_client, "penstock", [sender.make(1, 4, held), sender.make(5, 10, held)])
        [(_, reply)] = append_together(redis_client, "penstock", [sender.make(first, last, sent, lineage)])

        shared, case = min(last, 10), (sent, first, last)
        is_ours = lineage == 0
        known = Appended(Offset(max(10, last)), max(0, last - 10))
        assert reply == (known if is_ours else Foreign(Offset(shared), str(journal(0)[shared - 1][0]))), case
        sender.tail = max(10, last) if is_ours else 10
        sender.the_log_is_the_journals()
