"""An Ick with many members: marked, marked again, reserved, done; and how long one call keeps Redis from everybody else.

Beside it stand the sorted set's own commands, which fold as well (``ZADD LT``) and take the lowest (``ZPOPMIN``), and
promise nothing: what was popped is gone with whoever has popped it.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from time import perf_counter
from typing import Any

from penstock.bench.measuring import Case, NotMeasured, Sample, percentile
from penstock.bench.plant import Plant, Scale
from penstock.channels.ick import DirtyList, Reservation, Reservations
from penstock.channels.ick.operations import SLICE
from penstock.channels.ick.reservations import DEFAULT_SIZE
from penstock.channels.server import RedisClient
from penstock.testing import eventually

MEMBERS_A_RECORD = 10
"""Members are smaller than records: ten times as many make a million at full scale."""

AGAIN = 10
"""How often each member becomes dirty again."""

MARKS_AT_ONCE = 10_000
"""Marks that an application hands over in one call."""

ICK, TEMPLATE, PLAIN = "bench-ick", "bench-template", "bench-plain"
FIRST_SCORE = 1_700_000_000.0

Marks = list[tuple[bytes, float]]


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """Marking, taking, and the longest call of each."""
    members = scale.records * MEMBERS_A_RECORD
    rounds = scale.few_rounds
    return [
        Case(
            name="ick-add",
            unit="marks/s",
            sentence=f"{members:,} members are marked, and {AGAIN} times again",
            ours=lambda: _marked(plant, members, _add),
            limits={
                "zadd": lambda: _marked(plant, members, _zadd_packed),
                "zadd by redis-py": lambda: _marked(plant, members, _zadd),
            },
            slow=True,
            rounds=1,  # of eleven turns each
        ),
        Case(
            name="ick-reserve",
            unit="members/s",
            sentence=f"{members:,} members are taken by fenced reservations of {DEFAULT_SIZE}, each exchanged for the next",
            ours=lambda: _taken(plant, members, _fenced),
            limits={"zpopmin": lambda: _taken(plant, members, _zpopmin)},
            rounds=rounds,
        ),
        Case(
            name="ick-exchange",
            unit="members/s",
            sentence=f"the same by the plain operation, {DEFAULT_SIZE} an exchange",
            ours=lambda: _taken(plant, members, _exchanged),
            limits={"zpopmin": lambda: _taken(plant, members, _zpopmin)},
            rounds=rounds,
        ),
        Case(
            name="ick-block-add",
            unit="ms",
            sentence=f"how long Redis is busy with one call that marks {SLICE:,}, beside {members:,} members (longest, p99; longest by the clock)",
            ours=lambda: _longest(plant, members, "evalsha", _again(_add)),
            limits={"zadd": lambda: _longest(plant, members, "zadd", _again(_zadd))},
            better="less",
            rounds=rounds,
        ),
        Case(
            name="ick-block-reserve",
            unit="ms",
            sentence=f"the same for one that exchanges a reservation of {DEFAULT_SIZE}",
            ours=lambda: _longest(plant, members, "evalsha", _fenced),
            limits={"zpopmin": lambda: _longest(plant, members, "zpopmin", _zpopmin)},
            better="less",
            rounds=rounds,
        ),
    ]


def _marks(members: int, turn: int) -> Iterator[Marks]:
    """Every member once, each time in another order, and later from one turn to the next."""
    # Coprime to every scale of ours: all members come, neighbours far apart.
    step = pow(7919, turn + 1)
    for first in range(0, members, MARKS_AT_ONCE):
        last = min(first + MARKS_AT_ONCE, members)
        yield [
            (b"document-%d" % (n * step % members), FIRST_SCORE + turn * members + n)
            for n in range(first, last)
        ]


def _marked(plant: Plant, members: int, mark: Callable[[RedisClient, Marks], float]) -> Sample:
    """Marks a second: every member once, and ``AGAIN`` times again; what has to be marked lies ready."""
    plant.empty_redis()
    took = 0.0
    with plant.redis() as client:
        for turn in range(AGAIN + 1):
            for marks in _marks(members, turn):
                took += mark(client, marks)
        found = client.zcard(DirtyList(client, ICK).keys.dirty) + client.zcard(PLAIN)
    if found != members:
        raise NotMeasured(f"{found} of {members} members are dirty")
    return {"": members * (AGAIN + 1) / took}


def _add(client: RedisClient, marks: Marks) -> float:
    ick = DirtyList(client, ICK)
    began = perf_counter()
    ick.add(marks)
    return perf_counter() - began


def _zadd(client: RedisClient, marks: Marks) -> float:
    began = perf_counter()
    pipeline = client.pipeline(transaction=False)
    for at in range(0, len(marks), SLICE):
        pipeline.zadd(PLAIN, dict(marks[at : at + SLICE]), lt=True)
    pipeline.execute()
    return perf_counter() - began


def _zadd_packed(client: RedisClient, marks: Marks) -> float:
    """The commands lie ready as bytes; the next is under way before the last is answered."""
    with closing(_Wire(client)) as wire:
        packed = [
            wire.pack("ZADD", PLAIN, "LT", *(v for m, s in marks[at : at + SLICE] for v in (s, m)))
            for at in range(0, len(marks), SLICE)
        ]
        began = perf_counter()
        wire.send_each(packed)
        return perf_counter() - began


class _Wire:
    """A connection without what a client does around it."""

    def __init__(self, client: RedisClient) -> None:
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


def _filled(plant: Plant, client: RedisClient, members: int) -> None:
    """An Ick and a plain sorted set, each with all members dirty; made once, copied for each run."""
    if client.zcard(TEMPLATE) != members:
        plant.empty_redis()
        for marks in _marks(members, 0):
            _zadd(client, marks)
        client.rename(PLAIN, TEMPLATE)
    ick = DirtyList(client, ICK)
    ick.delete()
    ick.add({})
    client.copy(TEMPLATE, ick.keys.dirty, replace=True)
    client.copy(TEMPLATE, PLAIN, replace=True)
    # What was deleted is freed and given back to the system now, and not in the middle of somebody's call.
    eventually(lambda: not client.info("memory")["lazyfree_pending_objects"], "memory is freed")
    client.memory_purge()


Calls = Callable[[RedisClient], Iterator[int]]
"""Calls of Redis, one after the other: after each the number of members that it took or marked."""


def _taken(plant: Plant, members: int, calls: Calls) -> Sample:
    with plant.redis() as client:
        _filled(plant, client, members)
        began = perf_counter()
        taken = sum(calls(client))
        took = perf_counter() - began
    if taken != members:
        raise NotMeasured(f"{taken} of {members} members were taken")
    return {"": taken / took}


def _fenced(client: RedisClient) -> Iterator[int]:
    consumer = Reservations(client, ICK)
    answer: object = consumer.reserve()
    while isinstance(answer, Reservation) and answer.marks:
        yield len(answer.marks)
        answer = consumer.exchange(answer)


def _exchanged(client: RedisClient) -> Iterator[int]:
    ick = DirtyList(client, ICK)
    marks = ick.reserve(DEFAULT_SIZE)
    while marks:
        yield len(marks)
        marks = ick.exchange(DEFAULT_SIZE, [member for member, _ in marks]).marks


def _zpopmin(client: RedisClient) -> Iterator[int]:
    while some := client.zpopmin(PLAIN, DEFAULT_SIZE):
        yield len(some)


def _again(mark: Callable[[RedisClient, Marks], float]) -> Calls:
    """New members and old ones, half of each: a mark that is new costs more than one that is folded."""

    def calls(client: RedisClient) -> Iterator[int]:
        for marks in _marks(client.zcard(TEMPLATE), 1):
            half = [(m if n % 2 else m + b"-new", s) for n, (m, s) in enumerate(marks)]
            for at in range(0, len(half), SLICE):
                mark(client, half[at : at + SLICE])
                yield SLICE

    return calls


def _longest(plant: Plant, members: int, command: str, calls: Calls) -> Sample:
    """How long Redis is busy with one call of ``command``, in ms.

    A call takes no longer than the clock says that it took, nor than its thread was on a processor since the call
    before: in the one is the load of others, in the other what Redis does between calls.  The lesser is told, and the
    longest by the clock.
    """
    busy, clock = [], []
    with plant.redis() as client:
        _filled(plant, client, members)
        before = _spent_ms(client, command)
        for _ in calls(client):
            after = _spent_ms(client, command)
            on_processor, by_clock = (b - a for a, b in zip(before, after, strict=True))
            busy.append(min(on_processor, by_clock))
            clock.append(by_clock)
            before = after
    return {"": max(busy), "-p99": percentile(busy, 0.99), "-clock": max(clock)}


def _spent_ms(client: RedisClient, command: str) -> tuple[float, float]:
    """What Redis' main thread has used of its processor, and what calls of ``command`` have taken by the clock."""
    found = client.info("cpu", "commandstats")
    processor_s = found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"]
    calls = found.get(f"cmdstat_{command}", {"usec": 0})
    return float(processor_s) * 1000, calls["usec"] / 1000
