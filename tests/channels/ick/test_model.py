"""Thousands of random steps of all operations, plain, fenced and by Redis::Ick on the same keys, against a plain model."""

from dataclasses import dataclass
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from fixtures.redis_ick import RedisIck
from penstock.channels.ick.reservations import ALL_MEMBERS, CurrentReservation
from penstock.clients import Busy, Committed, DirtyList, Released, Reservation, Reservations, Superseded

KEY = "ride-index"
MEMBERS = st.sampled_from([b"", b"a", b"b", b"c", b"\x00", b"\xff", b"{k}", b"7", b"8", b"9"])
SCORES = st.integers(-3, 9).map(lambda number: number / 2)
MARKS = st.lists(st.tuples(MEMBERS, SCORES), max_size=8)
SIZES = st.integers(0, 6)
WHO = st.integers(0, 2)
DONE = st.just(ALL_MEMBERS) | st.lists(MEMBERS, max_size=4)

Set = dict[bytes, float]


def ordered(members: Set) -> list[tuple[bytes, float]]:
    return sorted(members.items(), key=lambda mark: (mark[1], mark[0]))


def lower(members: Set, member: bytes, score: float) -> tuple[int, int]:
    """Keeps the lower score; returns how many members are new, and how many changed."""
    old = members.get(member)
    if old is None or score < old:
        members[member] = score
    return int(old is None), int(old is not None and score < old)


def move_lowest(source: Set, target: Set, most: int) -> None:
    for member, score in ordered(source):
        if len(target) >= most:
            return
        lower(target, member, score)
        del source[member]


@dataclass
class Consumer:
    """A fenced consumer, and its last reservation."""

    reservations: Reservations
    size: int
    adopts: bool
    last: Reservation | None = None


class Model(RuleBasedStateMachine):
    """The Ick in Redis, and a model of it: three sets, and who holds the third."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.ours = DirtyList(self.client, KEY)
        self.rubys = RedisIck(self.client, KEY)
        self.consumers = [
            Consumer(Reservations(self.client, KEY, holder=f"consumer {size}", size=size, adopt=adopts), size, adopts)
            for size, adopts in ((2, True), (3, False), (4, True))
        ]
        self._clear()

    def _clear(self) -> None:
        self.exists = False
        self.dirty: Set = {}
        self.reserved: Set = {}
        self.held: Set = {}
        self.current = CurrentReservation(0, "", "", 0)
        self.committed = 0

    # --- plain operations ---

    @rule(marks=MARKS)
    def add(self, marks: list[tuple[bytes, float]]) -> None:
        counts = [lower(self.dirty, *mark) for mark in marks]
        self.exists = True

        added = self.ours.add(marks)
        assert added.new == sum(new for new, _ in counts)
        assert added.lowered == sum(lowered for _, lowered in counts)

    @rule(marks=st.dictionaries(MEMBERS, SCORES, max_size=4))
    def ruby_adds(self, marks: dict[Any, float]) -> None:
        counts = [lower(self.dirty, *mark) for mark in marks.items()]
        self.exists = True

        assert self.rubys.add(marks) == (sum(n for n, _ in counts), sum(c for _, c in counts))

    @rule(size=SIZES, done=st.lists(MEMBERS, max_size=4), backwash=st.booleans())
    def exchange(self, size: int, done: list[bytes], *, backwash: bool) -> None:
        committed, marks = self._exchange(size, done, backwash=backwash)

        exchanged = self.ours.exchange(size, done, backwash=backwash)
        assert (exchanged.committed, exchanged.marks) == (committed, marks)

    @rule(size=SIZES, done=st.lists(MEMBERS, max_size=4), backwash=st.booleans())
    def ruby_exchanges(self, size: int, done: list[bytes], *, backwash: bool) -> None:
        _, marks = self._exchange(size, done, backwash=backwash)

        assert self.rubys.exchange(size, done, backwash=backwash) == marks

    @rule(size=SIZES, backwash=st.booleans())
    def reserve(self, size: int, *, backwash: bool) -> None:
        _, marks = self._exchange(size, [], backwash=backwash)

        assert self.ours.reserve(size, backwash=backwash) == marks

    @rule(done=st.lists(MEMBERS, max_size=4))
    def commit(self, done: list[bytes]) -> None:
        committed, _ = self._exchange(0, done, backwash=False)

        assert self.ours.commit(done) == committed

    @rule(unlink=st.booleans())
    def delete(self, *, unlink: bool) -> None:
        keys = self.exists + bool(self.dirty) + bool(self.reserved)
        self._clear()

        assert self.ours.delete(unlink=unlink) == keys
        assert self.client.dbsize() == 0

    @precondition(lambda self: not self.dirty and not self.reserved)
    @rule()
    def lose_version(self) -> None:
        """What is held alone needs none; an Ick that gets members back has one again."""
        self.client.delete(self.ours.keys.version)
        self.exists = False

    # --- fenced operations ---

    @rule(who=WHO, replaces=st.booleans(), above=st.integers(0, 9))
    def begin(self, who: int, above: int, *, replaces: bool) -> None:
        """A first reservation, or a new one; with ``replaces``, in place of the one that was current for somebody."""
        consumer = self.consumers[who]
        seen = self.consumers[(who + 1) % 3].last if replaces else None
        answer = consumer.reservations.reserve(in_place_of=seen, above=above)

        is_stale_holders = seen is not None and self._is_current(seen)
        if self.current.request and self.current.holder != consumer.reservations.holder and not is_stale_holders:
            assert answer == Busy(*self._fields())
            return
        assert isinstance(answer, Reservation)
        self.exists |= bool(self.held)
        for member, score in self.held.items():
            lower(self.dirty, member, score)
        self.held = {}
        self._hold(consumer, answer, above, 0)

    @rule(who=WHO, done=DONE, above=st.integers(0, 9))
    def continue_(self, who: int, done: Any, above: int) -> None:
        consumer, last = self.consumers[who], self.consumers[who].last
        if last is None:
            return
        answer = consumer.reservations.exchange(last, done, above=above)
        if not self._is_current(last):
            assert answer == Superseded(*self._fields())
            return
        assert isinstance(answer, Reservation)
        self.exists |= bool(self.held)
        committed = self._commit_held(done)
        if committed or self.held or self.dirty or (consumer.adopts and self.reserved):
            self._hold(consumer, answer, above, committed)
            assert consumer.reservations.exchange(last, done, above=above) == answer, "it is repeated"
        else:
            assert (answer.number, answer.request, answer.marks) == (last.number, last.request, ())
            assert answer.committed == 0

    @rule(who=WHO, done=st.lists(MEMBERS, max_size=4))
    def commit_held(self, who: int, done: list[bytes]) -> None:
        consumer = self.consumers[who]
        if consumer.last is None:
            return
        answer = consumer.reservations.commit(consumer.last, done)
        if self._is_current(consumer.last):
            assert answer == Committed(self._commit_held(done))
            number, request, holder, heartbeats = self._fields()
            self.current = CurrentReservation(number, request, holder, heartbeats + 1)
        else:
            assert answer == Superseded(*self._fields())

    @rule(who=WHO, done=DONE)
    def release(self, who: int, done: Any) -> None:
        consumer = self.consumers[who]
        if consumer.last is None:
            return
        answer = consumer.reservations.release(consumer.last, done)
        if not self._is_current(consumer.last):
            assert answer == Superseded(*self._fields())
            return
        committed = self._commit_held(done)
        assert answer == Released(committed, len(self.held))
        for member, score in self.held.items():
            lower(self.dirty, member, score)
        self.exists |= bool(self.held)
        self.held, self.current = {}, CurrentReservation(self.current.number, "", "", 0)

    @rule(who=WHO)
    def read(self, who: int) -> None:
        consumer, last = self.consumers[who], self.consumers[who].last
        if last is None:
            return
        answer = consumer.reservations.read(last)
        if self._is_current(last):
            assert answer == Reservation(last.number, last.request, tuple(ordered(self.held)), self.committed)
        else:
            assert answer == Superseded(*self._fields())

    # --- what must hold ---

    @invariant()
    def redis_matches_the_model(self) -> None:
        stats = self.ours.stats()

        assert (stats is not None) == self.exists
        spans = [(stats.dirty, self.dirty), (stats.reserved, self.reserved), (stats.held, self.held)] if stats else []
        for span, members in spans:
            scores = sorted(members.values())
            assert span.size == len(scores)
            assert [span.lowest, span.highest] == ([scores[0], scores[-1]] if scores else [None] * 2)
        if stats is not None:  # what is held alone is none
            assert (stats.number, stats.holder) == (self.current.number, self.current.holder)
            every = [score for _, members in spans for score in members.values()]
            assert stats.total.size == len(every)
            assert [stats.total.lowest, stats.total.highest] == [min(every, default=None), max(every, default=None)]
        keys = self.ours.keys
        for key, members in ((keys.dirty, self.dirty), (keys.reserved, self.reserved), (keys.held, self.held)):
            assert self.client.zrange(key, 0, -1, withscores=True) == ordered(members)

    def _exchange(self, size: int, done: list[bytes], *, backwash: bool) -> tuple[int, list[tuple[bytes, float]]]:
        committed = sum(self.reserved.pop(member, None) is not None for member in done)
        if backwash:
            move_lowest(self.reserved, self.dirty, len(self.dirty) + len(self.reserved) + 1)
        move_lowest(self.dirty, self.reserved, size)
        self.exists = True
        return committed, ordered(self.reserved)[:size]

    def _is_current(self, reservation: Reservation) -> bool:
        return (reservation.number, reservation.request) == (self.current.number, self.current.request)

    def _fields(self) -> tuple[int, str, str, int]:
        return self.current.number, self.current.request, self.current.holder, self.current.heartbeats

    def _commit_held(self, done: Any) -> int:
        members = [*self.held] if done is ALL_MEMBERS else done
        return sum(self.held.pop(member, None) is not None for member in members)

    def _hold(self, consumer: Consumer, answer: Reservation, above: int, committed: int) -> None:
        """A reservation begins: it gives back what is too much, and takes the lowest of what there is."""
        for member, score in ordered(self.held)[consumer.size :]:
            lower(self.dirty, member, score)
            del self.held[member]
        available = [(score, 0, member) for member, score in self.dirty.items()]
        available += [(score, 1, member) for member, score in self.reserved.items() if consumer.adopts]
        kept = set(self.held)
        for score, _, member in sorted(available):
            if len(self.held) < consumer.size and member not in self.held:
                self.held[member] = score
        for member in self.held.keys() - kept:
            self.dirty.pop(member, None)
            if consumer.adopts:
                self.reserved.pop(member, None)
        number = max(self.current.number, above) + 1
        assert (answer.number, answer.committed) == (number, committed)
        assert answer.marks == tuple(ordered(self.held))
        assert answer.request != self.current.request
        self.current = CurrentReservation(number, answer.request, consumer.reservations.holder, 0)
        self.committed, consumer.last = committed, answer


def check(client: redis.Redis, *, examples: int) -> None:
    machine = type("Checked", (Model,), {"client": client})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=50))


@pytest.mark.parametrize("examples", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_all_operations_match_a_plain_model(redis_client: redis.Redis, examples: int) -> None:
    """Equal scores come in the order of their bytes; a member in two sets keeps the lower score and takes no extra room."""
    check(redis_client, examples=examples)


@pytest.mark.storm
@pytest.mark.timeout(600)
def test_all_operations_match_a_plain_model_over_long_runs(redis_client: redis.Redis) -> None:
    check(redis_client, examples=1_500)
