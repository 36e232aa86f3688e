"""An Ick with many members: marked, marked again, reserved, done; and how long one call blocks Redis.

The limits are the sorted set's own commands.  They coalesce as well (``ZADD LT``) and take the lowest (``ZPOPMIN``), but
without a guarantee: members that a client has popped are lost if it dies.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from time import perf_counter
from typing import Any

from benchmarks.backlogs import Scale
from benchmarks.measuring import Case, Figures, NotMeasured, percentile
from benchmarks.servers import BenchServers
from penstock.channels.ick.operations import SLICE
from penstock.channels.ick.reservations import DEFAULT_SIZE
from penstock.clients import DirtyList, Reservation, Reservations
from penstock.testing import eventually

MEMBERS_A_RECORD = 10
"""Members are smaller than records: ten times as many, a million at full scale."""

AGAIN = 10
"""How often each member is marked again."""

MARKS_AT_ONCE = 10_000
"""Marks that an application passes in one call."""

ICK, TEMPLATE, PLAIN = "bench-ick", "bench-template", "bench-plain"
FIRST_SCORE = 1_700_000_000.0

Marks = list[tuple[bytes, float]]


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Marking, taking, and the longest call of each."""
    members = scale.records * MEMBERS_A_RECORD
    rounds = scale.few_rounds
    return [
        Case(
            name="ick-add",
            unit="marks/s",
            sentence=f"{members:,} members are marked, and then {AGAIN} times again",
            ours=lambda: _measure_marking(servers, members, _add),
            limits={
                "zadd": lambda: _measure_marking(servers, members, _zadd_packed),
                "zadd by redis-py": lambda: _measure_marking(servers, members, _zadd),
            },
            slow=True,
            rounds=1,  # of eleven turns each
        ),
        Case(
            name="ick-reserve",
            unit="members/s",
            sentence=f"{members:,} members are taken by fenced reservations of {DEFAULT_SIZE}, each exchanged for the next",
            ours=lambda: _measure_taking(servers, members, _take_fenced),
            limits={"zpopmin": lambda: _measure_taking(servers, members, _take_by_zpopmin)},
            rounds=rounds,
        ),
        Case(
            name="ick-exchange",
            unit="members/s",
            sentence=f"the same by the plain operation, {DEFAULT_SIZE} per exchange",
            ours=lambda: _measure_taking(servers, members, _take_by_exchange),
            limits={"zpopmin": lambda: _measure_taking(servers, members, _take_by_zpopmin)},
            rounds=rounds,
        ),
        Case(
            name="ick-block-add",
            unit="ms",
            sentence=f"how long Redis is busy with one call that marks {SLICE:,} in an Ick of {members:,} members (longest, p99; longest by the clock)",
            ours=lambda: _measure_longest_call(servers, members, "evalsha", _mark_again(_add)),
            limits={"zadd": lambda: _measure_longest_call(servers, members, "zadd", _mark_again(_zadd))},
            better="less",
            rounds=rounds,
        ),
        Case(
            name="ick-block-reserve",
            unit="ms",
            sentence=f"the same for one that exchanges a reservation of {DEFAULT_SIZE}",
            ours=lambda: _measure_longest_call(servers, members, "evalsha", _take_fenced),
            limits={"zpopmin": lambda: _measure_longest_call(servers, members, "zpopmin", _take_by_zpopmin)},
            better="less",
            rounds=rounds,
        ),
    ]


def _make_marks(members: int, turn: int) -> Iterator[Marks]:
    """Every member once, in a different order each time, with higher scores than the time before."""
    # Coprime to the number of members: each occurs once, and neighbours are far apart.
    step = pow(7919, turn + 1)
    for first in range(0, members, MARKS_AT_ONCE):
        last = min(first + MARKS_AT_ONCE, members)
        yield [(b"document-%d" % (n * step % members), FIRST_SCORE + turn * members + n) for n in range(first, last)]


def _measure_marking(servers: BenchServers, members: int, mark: Callable[[Any, Marks], float]) -> Figures:
    """Marks per second: every member once, and then ``AGAIN`` times again; preparing the marks is not counted."""
    servers.empty_redis()
    took = 0.0
    with servers.redis() as client:
        for turn in range(AGAIN + 1):
            for marks in _make_marks(members, turn):
                took += mark(client, marks)
        found = client.zcard(DirtyList(client, ICK).keys.dirty) + client.zcard(PLAIN)
    if found != members:
        raise NotMeasured(f"{found} of {members} members are dirty")
    return {"": members * (AGAIN + 1) / took}


def _add(client: Any, marks: Marks) -> float:
    ick = DirtyList(client, ICK)
    began = perf_counter()
    ick.add(marks)
    return perf_counter() - began


def _zadd(client: Any, marks: Marks) -> float:
    began = perf_counter()
    pipeline = client.pipeline(transaction=False)
    for at in range(0, len(marks), SLICE):
        pipeline.zadd(PLAIN, dict(marks[at : at + SLICE]), lt=True)
    pipeline.execute()
    return perf_counter() - began


def _zadd_packed(client: Any, marks: Marks) -> float:
    """The commands are packed beforehand; each is sent before the reply to the previous one is read."""
    with closing(_Wire(client)) as wire:
        packed = [
            wire.pack("ZADD", PLAIN, "LT", *(v for m, s in marks[at : at + SLICE] for v in (s, m)))
            for at in range(0, len(marks), SLICE)
        ]
        began = perf_counter()
        wire.send_each(packed)
        return perf_counter() - began


class _Wire:
    """A connection without the client's own processing."""

    def __init__(self, client: Any) -> None:
        self._pool = client.connection_pool
        self._connection = self._pool.get_connection()

    def close(self) -> None:
        self._pool.release(self._connection)

    def pack(self, *words: Any) -> Any:
        return self._connection.pack_command(*words)

    def send_each(self, packed: list[Any]) -> None:
        for number, command in enumerate(packed):
            self._connection.send_packed_command(command)
            if number:
                self._connection.read_response()
        self._connection.read_response()


def _fill(servers: BenchServers, client: Any, members: int) -> None:
    """Creates an Ick and a plain sorted set with all members dirty: filled once, copied for each run."""
    if client.zcard(TEMPLATE) != members:
        servers.empty_redis()
        for marks in _make_marks(members, 0):
            _zadd(client, marks)
        client.rename(PLAIN, TEMPLATE)
    ick = DirtyList(client, ICK)
    ick.delete()
    ick.add({})
    client.copy(TEMPLATE, ick.keys.dirty, replace=True)
    client.copy(TEMPLATE, PLAIN, replace=True)
    # Deleted memory is freed and returned to the system now, not during a measured call.
    eventually(lambda: not client.info("memory")["lazyfree_pending_objects"], "memory is freed")
    client.memory_purge()


Calls = Callable[[Any], Iterator[int]]
"""Calls Redis repeatedly; yields after each call the number of members that it took or marked."""


def _measure_taking(servers: BenchServers, members: int, calls: Calls) -> Figures:
    with servers.redis() as client:
        _fill(servers, client, members)
        began = perf_counter()
        taken = sum(calls(client))
        took = perf_counter() - began
    if taken != members:
        raise NotMeasured(f"{taken} of {members} members were taken")
    return {"": taken / took}


def _take_fenced(client: Any) -> Iterator[int]:
    consumer = Reservations(client, ICK)
    answer: object = consumer.reserve()
    while isinstance(answer, Reservation) and answer.marks:
        yield len(answer.marks)
        answer = consumer.exchange(answer)


def _take_by_exchange(client: Any) -> Iterator[int]:
    ick = DirtyList(client, ICK)
    marks = ick.reserve(DEFAULT_SIZE)
    while marks:
        yield len(marks)
        marks = ick.exchange(DEFAULT_SIZE, [member for member, _ in marks]).marks


def _take_by_zpopmin(client: Any) -> Iterator[int]:
    while some := client.zpopmin(PLAIN, DEFAULT_SIZE):
        yield len(some)


def _mark_again(mark: Callable[[Any, Marks], float]) -> Calls:
    """Marks new members and old ones, half of each: a new mark costs more than one that is coalesced."""

    def calls(client: Any) -> Iterator[int]:
        for marks in _make_marks(client.zcard(TEMPLATE), 1):
            half = [(m if n % 2 else m + b"-new", s) for n, (m, s) in enumerate(marks)]
            for at in range(0, len(half), SLICE):
                mark(client, half[at : at + SLICE])
                yield SLICE

    return calls


def _measure_longest_call(servers: BenchServers, members: int, command: str, calls: Calls) -> Figures:
    """How long Redis is busy with one call of ``command``, in ms.

    There are two upper bounds for a call: its time by the clock, which includes the load of other processes, and the
    processor time of Redis' main thread since the previous call, which includes what Redis does between calls.  The
    figure is the lesser of the two; ``-clock`` is the longest by the clock.
    """
    busy, clock = [], []
    with servers.redis() as client:
        _fill(servers, client, members)
        before = _read_spent_ms(client, command)
        for _ in calls(client):
            after = _read_spent_ms(client, command)
            on_processor, by_clock = (b - a for a, b in zip(before, after, strict=True))
            busy.append(min(on_processor, by_clock))
            clock.append(by_clock)
            before = after
    return {"": max(busy), "-p99": percentile(busy, 0.99), "-clock": max(clock)}


def _read_spent_ms(client: Any, command: str) -> tuple[float, float]:
    """Processor time of Redis' main thread, and the time of all calls of ``command`` by the clock, in ms."""
    found = client.info("cpu", "commandstats")
    processor_s = found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"]
    calls = found.get(f"cmdstat_{command}", {"usec": 0})
    return float(processor_s) * 1000, calls["usec"] / 1000
