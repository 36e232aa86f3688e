"""Marks of a pipeline under publishers that repeat, overlap and fall behind, consumers, losses and damage.

The model is a journal: who marks a record's member, and up to which record each member has been processed.  At any moment, a record
up to the position has been processed, or its member waits.  What is reported as done has been processed: the journal forgets it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from penstock.batches.columns import Columns
from penstock.channels.batch_outcomes import Appended, Batch, Behind, FencedOff, Foreign, Reply, Unusable
from penstock.channels.ick.marking import MarkProgress, mark, update_progress
from penstock.channels.ick.reservations import CurrentReservation
from penstock.channels.routing import ick_shard_keys
from penstock.clients import DirtyList, Reservation, Reservations, repair
from penstock.errors import DamagedIck
from penstock.records import Epoch, Offset, Shard, ShardName

SHARD = ShardName("index", Shard(0))
KEYS = ick_shard_keys("penstock", SHARD)
SETS = (KEYS.ick.dirty, KEYS.ick.reserved, KEYS.ick.held)
LENGTH = 60
# Times are not in the order of offsets, and some are equal.
JOURNAL = [
    (offset, "abcde"[offset * offset % 5], 1_000_000 * (offset + offset * 5 % 7)) for offset in range(LENGTH + 1)
]


@dataclass
class Held:
    """What Redis should hold beside the members: lost with it, and restored with it."""

    marked: int = 0
    epoch: int = 0
    records: int = 0
    dirtied: int = 0
    keys: dict[bytes, bytes] = field(default_factory=dict)

    def copy(self, keys: dict[bytes, bytes]) -> "Held":
        return Held(self.marked, self.epoch, self.records, self.dirtied, keys)


class Marking(RuleBasedStateMachine):
    """One shard of an Ick."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.staged = self.forgotten = 0
        self.held = Held()
        self.older = Held()
        self.processed: Counter[str] = Counter()  # member: last offset that was committed when it was read
        self.dirty_list = DirtyList(self.client, KEYS.name)
        self.plain: dict[bytes, int] = {}
        self.fenced = Reservations(self.client, KEYS.name, size=2, adopt=False)
        self.reservation: Reservation | None = None
        self.reads: dict[bytes, int] = {}

    # --- publishers ---

    def make(self, first: int, last: int, epoch: int, *, begins: bool, lineage: tuple[int, int] = (0, 0)) -> Batch:
        id_more, us_more = lineage
        rows = [
            (offset + id_more, member, "dirty", "member", "{}", "", at_us + us_more)
            for offset, member, at_us in JOURNAL[first : last + 1]
        ]
        return Batch(SHARD, Epoch(epoch), Offset(first), begins, Columns.pack(rows))

    def send(self, batch: Batch) -> Reply:
        return mark(self.client, "penstock", batch)

    def scores(self, key: str) -> dict[str, float]:
        found: Any = self.client.zrange(key, 0, -1, withscores=True)
        return {member.decode(): score for member, score in found}

    @rule(count=st.integers(1, 8))
    def stage(self, count: int) -> None:
        self.staged = min(LENGTH, self.staged + count)

    @rule(back=st.integers(0, 8), count=st.integers(1, 8), epoch=st.integers(1, 3), begins=st.booleans())
    def mark(self, back: int, count: int, epoch: int, *, begins: bool) -> None:
        """A batch from anywhere; a publisher knows if no record before it exists any more."""
        first = max(self.forgotten + 1, self.held.marked + 2 - back)
        if first > self.staged:
            return
        last = min(self.staged, first + count - 1)
        begins = begins and (first == self.forgotten + 1 or self.held.marked >= first)
        before, held = self.scores(KEYS.ick.dirty), self.held
        reply = self.send(self.make(first, last, epoch, begins=begins))
        if epoch < held.epoch:
            assert reply == FencedOff(Epoch(held.epoch))
        elif held.marked >= last:
            assert reply == Appended(Offset(held.marked), 0)
            held.epoch = epoch
        elif held.marked >= first or (held.marked < first - 1 and not begins):
            assert reply == Behind(Offset(held.marked))
        else:
            assert reply == Appended(Offset(last), last - first + 1)
            held.epoch, held.marked = epoch, last
            held.records += last - first + 1
            for _, member, at_us in JOURNAL[first : last + 1]:
                held.dirtied += member not in before
                before[member] = min(before.get(member, at_us / 1_000_000), at_us / 1_000_000)
        assert self.scores(KEYS.ick.dirty) == before
        assert int(self.client.get(KEYS.log.epoch) or 0) == held.epoch

    @rule(count=st.integers(1, 8), lineage=st.sampled_from([(1000, 0), (0, 7)]))
    def mark_other_records(self, count: int, lineage: tuple[int, int]) -> None:
        """Another database's, with the same offsets: seen where both end."""
        last = self.held.marked
        first = max(1, last - count + 1)
        if last == 0:
            return
        before = self.dump()
        reply = self.send(self.make(first, last, max(1, self.held.epoch), begins=False, lineage=lineage))
        assert reply == Foreign(Offset(last), str(last))
        assert self.dump() == before

    # --- consumers ---

    def process(self, reads: dict[bytes, int]) -> None:
        for member, version in reads.items():
            self.processed[member.decode()] = max(self.processed[member.decode()], version)

    @rule(size=st.integers(1, 3))
    def consume(self, size: int) -> None:
        """A plain consumer commits its whole batch before it reserves the next."""
        self.process(self.plain)
        done, self.plain = [*self.plain], {}
        self.plain = {member: self.staged for member, _ in self.dirty_list.exchange(size, done).marks}

    @rule(done=st.booleans())
    def consume_fenced(self, *, done: bool) -> None:
        if self.reservation is None:
            reserved: Reservation | CurrentReservation = self.fenced.reserve()
        elif done:
            self.process(self.reads)
            reserved = self.fenced.exchange(self.reservation)
        else:
            self.fenced.release(self.reservation)
            self.reservation = None
            return
        if isinstance(reserved, CurrentReservation):
            self.reservation = None
            return
        self.reservation, self.reads = reserved, dict.fromkeys(reserved.members, self.staged)

    @rule(forgets=st.booleans())
    def progress(self, *, forgets: bool) -> None:
        progress = update_progress(self.client, "penstock", [SHARD])[SHARD]
        held = self.held
        assert (progress.marked_up_to, progress.records, progress.dirtied) == (held.marked, held.records, held.dirtied)
        self.check_done(progress)
        if forgets:
            self.forgotten = max(self.forgotten, progress.done_up_to)

    def check_done(self, progress: MarkProgress) -> None:
        assert progress.done_up_to <= progress.marked_up_to
        for offset, member, _ in JOURNAL[1 : progress.done_up_to + 1]:
            assert self.processed[member] >= offset, f"offset {offset} of {progress} is not done"
        if not any(map(self.client.exists, SETS)):
            assert progress.done_up_to == progress.marked_up_to

    # --- faults ---

    def dump(self) -> dict[bytes, bytes]:
        found: Any = self.client.keys()
        return {key: self.client.dump(key) or b"" for key in found}

    @rule()
    def save(self) -> None:
        self.older = self.held.copy(self.dump())

    @rule(wholly=st.booleans())
    def lose(self, *, wholly: bool) -> None:
        """Redis comes back empty, or as it was."""
        self.client.flushall()
        self.held = Held() if wholly else self.older.copy({})
        for key, value in ({} if wholly else self.older.keys).items():
            self.client.restore(key, 0, value)
        self.plain = {}  # a plain commit would forget what was marked since; the fenced consumer need not know

    @rule(
        way=st.sampled_from(["no version", "nothing", "an entry", "another entry", "another type"]), polls=st.booleans()
    )
    def damage(self, way: str, *, polls: bool) -> None:
        """The position is not believed, also if a consumer looks for members before a publisher looks for the position."""
        held = self.held
        if way == "no version":
            self.client.delete(KEYS.ick.version)
            if self.client.exists(KEYS.ick.dirty, KEYS.ick.reserved):
                self.check_refused()
                [_] = repair(self.client, KEYS.name)
                return
        elif way == "nothing":
            self.dirty_list.delete()
            self.plain, self.reservation = {}, None
        elif way == "another type":
            self.client.delete(KEYS.log.stream)
            self.client.set(KEYS.log.stream, "somebody's")
            self.check_refused()
            self.client.delete(KEYS.log.stream)
        elif held.marked and way == "an entry":
            self.client.xadd(KEYS.log.stream, {"id": "1"}, f"{held.marked + 1}-0")
        elif held.marked:
            fields: Any = {"id": "1", "key": "k", "action": "a", "object": "o", "data": "1", "headers": "", "ts": "5"}
            self.client.delete(KEYS.log.stream)
            self.client.xadd(KEYS.log.stream, fields, f"{held.marked}-0")
        if polls and way == "nothing":
            self.consume_fenced(done=True)
        held.marked = 0
        self.progress(forgets=False)

    def check_refused(self) -> None:
        """Whatever is marked or asked for, nothing is written."""
        before = self.dump()
        reply = self.send(self.make(1, 1, 3, begins=False))
        assert isinstance(reply, Unusable)
        assert isinstance(reply.error, DamagedIck)
        with pytest.raises(DamagedIck):
            update_progress(self.client, "penstock", [SHARD])
        assert self.dump() == before

    # --- what must hold ---

    @invariant()
    def a_record_was_processed_or_its_member_waits(self) -> None:
        waiting = {member for key in SETS for member in self.scores(key)}
        for offset, member, _ in JOURNAL[self.forgotten + 1 : self.held.marked + 1]:
            assert self.processed[member] >= offset or member in waiting, offset

    def teardown(self) -> None:
        """In the end, a publisher and a consumer finish everything."""
        after = int(update_progress(self.client, "penstock", [SHARD])[SHARD].marked_up_to)
        while (first := max(after, self.forgotten) + 1) <= self.staged:
            last = min(self.staged, first + 6)
            assert self.send(self.make(first, last, 3, begins=first > after + 1)) == Appended(
                Offset(last), last - first + 1
            )
            after = last
        consumer = Reservations(self.client, KEYS.name, size=3)
        reserved: Reservation | CurrentReservation = consumer.reserve()
        if isinstance(reserved, CurrentReservation):
            reserved = consumer.reserve(in_place_of=reserved)
        while isinstance(reserved, Reservation) and reserved.members:
            self.process(dict.fromkeys(reserved.members, self.staged))
            reserved = consumer.exchange(reserved)
        for offset, member, _ in JOURNAL[1 : self.staged + 1]:
            assert self.processed[member] >= offset
        assert update_progress(self.client, "penstock", [SHARD])[SHARD].done_up_to == after


def check(client: redis.Redis, *, examples: int) -> None:
    machine = type("Checked", (Marking,), {"client": client})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))


@pytest.mark.slow
def test_a_marked_record_is_processed_or_waits_whatever_happens_to_redis(redis_client: redis.Redis) -> None:
    """Guarantees 1, 3 and 9, for members of an Ick."""
    check(redis_client, examples=25)


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_a_marked_record_is_processed_or_waits_over_many_runs(redis_client: redis.Redis) -> None:
    check(redis_client, examples=1_000)
