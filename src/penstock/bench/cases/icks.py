"""An Ick with many members: marked, marked again, reserved, done; and how long one call keeps Redis from everybody else.

Beside it stand the sorted set's own commands, which fold as well (``ZADD LT``) and take the lowest (``ZPOPMIN``), and
promise nothing: what was popped is gone with whoever has popped it.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from time import perf_counter
from typing import Any

from penstock.bench.measuring import Case, NotMeasured, Sample
from penstock.bench.plant import Plant, Scale
from penstock.channels.ick import DirtyList, Reservation, Reservations
from penstock.channels.ick.operations import SLICE
from penstock.channels.ick.reservations import DEFAULT_SIZE
from penstock.channels.server import RedisClient

MEMBERS_A_RECORD = 10
"""Members are smaller than records: ten times as many make a million at full scale."""

AGAIN = 10
"""How often each member becomes dirty again."""

MARKS_AT_ONCE = 10_000
"""Marks that an application hands over in one call."""

ICK, TEMPLATE, PLAIN = "bench-ick", "bench-template", "bench-plain"
MOST_ROUNDS = 3
FIRST_SCORE = 1_700_000_000.0

Marks = list[tuple[bytes, float]]


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """Marking, taking, and the longest call of each."""
    members = scale.records * MEMBERS_A_RECORD
    rounds = min(scale.rounds, MOST_ROUNDS)
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
            sentence=f"the longest call that marks {SLICE:,} of {members:,} members (longest, p99)",
            ours=lambda: _longest(plant, members, "evalsha", _add_all),
            limits={"zadd": lambda: _longest(plant, members, "zadd", _zadd_all)},
            better="less",
            rounds=rounds,
        ),
        Case(
            name="ick-block-reserve",
            unit="ms",
            sentence=f"the longest call that exchanges a reservation of {DEFAULT_SIZE} of {members:,} members (longest, p99)",
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


def _taken(plant: Plant, members: int, take: Callable[[RedisClient], int]) -> Sample:
    with plant.redis() as client:
        _filled(plant, client, members)
        began = perf_counter()
        taken = take(client)
        took = perf_counter() - began
    if taken != members:
        raise NotMeasured(f"{taken} of {members} members were taken")
    return {"": taken / took}


def _fenced(client: RedisClient) -> int:
    consumer = Reservations(client, ICK)
    answer: object = consumer.reserve()
    taken = 0
    while isinstance(answer, Reservation) and answer.marks:
        taken += len(answer.marks)
        answer = consumer.exchange(answer)
    return taken


def _exchanged(client: RedisClient) -> int:
    ick = DirtyList(client, ICK)
    marks = ick.reserve(DEFAULT_SIZE)
    taken = 0
    while marks:
        taken += len(marks)
        marks = ick.exchange(DEFAULT_SIZE, [member for member, _ in marks]).marks
    return taken


def _zpopmin(client: RedisClient) -> int:
    taken = 0
    while some := client.zpopmin(PLAIN, DEFAULT_SIZE):
        taken += len(some)
    return taken


def _add_all(client: RedisClient) -> int:
    return sum(len(marks) for marks in _again(client, _add))


def _zadd_all(client: RedisClient) -> int:
    return sum(len(marks) for marks in _again(client, _zadd))


def _again(client: RedisClient, mark: Callable[[RedisClient, Marks], float]) -> Iterator[Marks]:
    """New members and old ones, half of each: a mark that is new costs more than one that is folded."""
    members = client.zcard(TEMPLATE)
    for marks in _marks(members, 1):
        half = [(m if n % 2 else m + b"-new", s) for n, (m, s) in enumerate(marks)]
        mark(client, half)
        yield half


def _longest(
    plant: Plant, members: int, command: str, work: Callable[[RedisClient], int]
) -> Sample:
    """How long Redis was busy with one call of ``command``, in ms, by its own measure."""
    with plant.redis() as client:
        _filled(plant, client, members)
        client.config_set("latency-tracking-info-percentiles", "50 99 100")
        client.config_resetstat()
        if work(client) != members:
            raise NotMeasured("not all members were marked or taken")
        found: Any = client.info("latencystats")[f"latency_percentiles_usec_{command}"]
    return {"": float(found["p100"]) / 1000, "-p99": float(found["p99"]) / 1000}
