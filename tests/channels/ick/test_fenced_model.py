"""No member is ever forgotten: reservations under random steps and faults.

In the model, a member has a version, which goes up when it becomes dirty.  A worker reads the version when a reservation
returns the member, and not again while the member is left over: the least careful worker that is still correct.  When it is
done, it writes the version it read to the copy and commits.  At any moment, a member whose copy is outdated must be in the
Ick.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fixtures.redis_ick import RedisIck
from penstock.channels.ick.reservations import ALL_MEMBERS, CurrentReservation
from penstock.clients import Busy, DirtyList, Reservation, Reservations

KEY = "ride-index"
MEMBERS = [bytes([letter]) for letter in b"abcdef"]
SOME = st.sets(st.sampled_from(MEMBERS))
WHO = st.integers(0, 1)


@dataclass
class Worker:
    """A fenced consumer: its reservation, and the versions it has read."""

    reservations: Reservations
    current: Reservation | None = None
    reads: Counter[bytes] = field(default_factory=Counter)


class Fenced(RuleBasedStateMachine):
    """Two fenced workers on one Ick, with zombies, duplicates, lost replies and takeovers."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.ick = DirtyList(self.client, KEY)
        self.rubys = RedisIck(self.client, KEY)
        self.clock = 0
        self.version: Counter[bytes] = Counter()
        self.copy: Counter[bytes] = Counter()
        self.workers = [Worker(Reservations(self.client, KEY, size=3)) for _ in range(2)]
        self.past: list[tuple[Reservations, Reservation, Counter[bytes]]] = []

    @rule(members=SOME)
    def become_dirty(self, members: set[bytes]) -> None:
        self.clock += 1
        self.version.update(members)
        self.ick.add([(member, self.clock) for member in members])

    @rule(member=st.sampled_from(MEMBERS))
    def ruby_makes_dirty(self, member: Any) -> None:
        self.clock += 1
        self.version[member] += 1
        self.rubys.add({member: self.clock})

    @rule(who=WHO, loses_reply=st.booleans())
    def reserve(self, who: int, *, loses_reply: bool) -> None:
        worker = self.workers[who]
        answer = worker.reservations.reserve()
        if not loses_reply and isinstance(answer, Reservation):
            self._begin(worker, answer, carried=set())

    @rule(who=WHO)
    def take_over(self, who: int) -> None:
        worker = self.workers[who]
        answer = worker.reservations.reserve()
        if isinstance(answer, Busy):
            answer = worker.reservations.reserve(in_place_of=answer)
        assert isinstance(answer, Reservation)
        self._begin(worker, answer, carried=set())

    @rule(who=WHO, done=SOME | st.just(ALL_MEMBERS), loses_reply=st.booleans())
    def exchange(self, who: int, done: Any, *, loses_reply: bool) -> None:
        worker = self.workers[who]
        if worker.current is None:
            return
        members = worker.current.members
        done = done if done is ALL_MEMBERS else done & set(members)
        self._write(worker.reads, members if done is ALL_MEMBERS else done)
        answer = worker.reservations.exchange(worker.current, done)
        if loses_reply:
            return
        if isinstance(answer, Reservation):
            finished = members if done is ALL_MEMBERS else done
            self._begin(worker, answer, carried=set(members) - set(finished))
        else:
            worker.current = None

    @rule(who=WHO, done=SOME)
    def commit(self, who: int, done: set[bytes]) -> None:
        worker = self.workers[who]
        if worker.current is not None:
            done &= set(worker.current.members)
            self._write(worker.reads, done)
            worker.reservations.commit(worker.current, done)

    @rule(who=WHO, done=SOME)
    def release(self, who: int, done: set[bytes]) -> None:
        worker = self.workers[who]
        if worker.current is not None:
            done &= set(worker.current.members)
            self._write(worker.reads, done)
            worker.reservations.release(worker.current, done)
            worker.current = None

    @rule(who=WHO)
    def crash(self, who: int) -> None:
        self.workers[who] = Worker(Reservations(self.client, KEY, size=3))

    @rule(which=st.integers(0, 99), done=SOME, way=st.sampled_from(["commit", "exchange", "exchange all", "release"]))
    def a_zombie_wakes(self, which: int, done: set[bytes], way: str) -> None:
        """A zombie or a duplicate reuses an earlier reservation, and the reply is lost."""
        if not self.past:
            return
        reservations, reservation, reads = self.past[which % len(self.past)]
        done &= set(reservation.members)
        current = next((w for w in self.workers if w.current == reservation), None)
        self._write(reads, reservation.members if way == "exchange all" else done)
        if way == "commit":
            reservations.commit(reservation, done)
        elif way == "release":
            reservations.release(reservation, done)
        else:
            reservations.exchange(reservation, ALL_MEMBERS if way == "exchange all" else done)
        if current is not None:
            current.current = None  # not a zombie: this worker sent the call itself, and died

    @invariant()
    def a_member_with_an_outdated_copy_is_in_the_ick(self) -> None:
        keys = self.ick.keys
        waiting: set[bytes] = set()
        for key in (keys.dirty, keys.reserved, keys.held):
            found: Any = self.client.zrange(key, 0, -1)
            waiting.update(found)

        assert {m for m in MEMBERS if self.copy[m] < self.version[m]} <= waiting

    @invariant()
    def a_worker_knows_every_member_it_holds(self) -> None:
        for worker in self.workers:
            if worker.current is not None:
                now = worker.reservations.read(worker.current)
                assert isinstance(now, CurrentReservation) or set(now.marks) <= set(worker.current.marks)

    def teardown(self) -> None:
        """In the end, a single consumer completes the copy."""
        last = Worker(Reservations(self.client, KEY, size=3))
        answer: object = last.reservations.reserve()
        if isinstance(answer, Busy):
            answer = last.reservations.reserve(in_place_of=answer)
        rounds = 0
        while isinstance(answer, Reservation) and answer.members:
            self._begin(last, answer, carried=set())
            self._write(last.reads, answer.members)
            answer = last.reservations.exchange(answer)
            rounds += 1
        assert self.copy == self.version
        assert rounds <= len(MEMBERS)

    def _begin(self, worker: Worker, answer: Reservation, carried: set[bytes]) -> None:
        for member in answer.members:
            if member not in carried:
                worker.reads[member] = self.version[member]
        worker.current = answer
        self.past.append((worker.reservations, answer, Counter(worker.reads)))

    def _write(self, reads: Counter[bytes], members: Any) -> None:
        for member in members:
            self.copy[member] = max(self.copy[member], reads[member])


class WithMonitor(Fenced):
    """With a monitor that reserves by plain operations and never commits."""

    @rule(size=st.integers(0, 4), backwash=st.booleans())
    def a_monitor_reserves(self, size: int, *, backwash: bool) -> None:
        self.rubys.reserve(size, backwash=backwash)


class WithPlainConsumer(Fenced):
    """With a consumer that uses plain operations and commits its whole batch before it reserves the next."""

    def __init__(self) -> None:
        super().__init__()
        self.rubys_reads: Counter[bytes] = Counter()

    @rule(size=st.integers(0, 4), backwash=st.booleans())
    def ruby_exchanges(self, size: int, *, backwash: bool) -> None:
        self._write(self.rubys_reads, self.rubys_reads)
        marks = self.rubys.exchange(size, list(self.rubys_reads), backwash=backwash)
        self.rubys_reads = Counter({member: self.version[member] for member, _ in marks})


MACHINES = [Fenced, WithMonitor, WithPlainConsumer]


def check(machine: type[Fenced], client: redis.Redis, *, examples: int) -> None:
    checked = type(machine.__name__, (machine,), {"client": client})
    run_state_machine_as_test(checked, settings=settings(max_examples=examples, stateful_step_count=50))


@pytest.mark.parametrize("examples", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_member_that_becomes_dirty_is_never_forgotten(
    redis_client: redis.Redis, machine: type[Fenced], examples: int
) -> None:
    check(machine, redis_client, examples=examples)


@pytest.mark.storm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_member_that_becomes_dirty_is_never_forgotten_for_long(
    redis_client: redis.Redis, machine: type[Fenced]
) -> None:
    check(machine, redis_client, examples=1_000)
