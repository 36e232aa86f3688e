"""Eight writers renew fields at random, while recruits delete what is over: nobody sees anything that is not true."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from time import monotonic

import pytest

from fixtures.clients import RedisClient, connect_redis
from penstock.clients import VolatileHash
from structures.conftest import Where
from structures.test_volatile_hash import FIELDS, TIMES

WRITERS, BATCH = 8, 25

DISAGREEING = """
local wrong = 0
for _, name in ipairs(redis.call("HKEYS", KEYS[1])) do
  local own = ARGV[1] == "auto" and redis.pcall("HPEXPIRETIME", KEYS[1], "FIELDS", 1, name) or {-1}
  local is_native, is_indexed = (own[1] or -1) > 0, redis.call("ZSCORE", KEYS[2], name) ~= false
  -- -2: it was over a moment ago.
  if is_native == is_indexed and own[1] ~= -2 then wrong = wrong + 1 end
end
for _, name in ipairs(redis.call("ZRANGE", KEYS[2], 0, -1)) do
  if redis.call("HEXISTS", KEYS[1], name) == 0 then wrong = wrong + 1 end
end
return wrong
"""
"""Fields of the hash with no deadline or two, and scores without a field, at one moment."""


@dataclass
class Known:
    """What the writer of a field knows of it: times are this process' own, in seconds."""

    value: bytes = b""
    live_until: float = 0.0
    over_from: float = 0.0


def slack_s(ttl_s: float) -> float:
    """The server rounds to milliseconds, and its clock is adjusted a little."""
    return 0.002 + ttl_s / 1000


class Writer:
    """Owns a part of the fields, so that it knows what is true of them."""

    def __init__(self, where: Where, number: int, fields: int) -> None:
        # Where the server keeps deadlines itself, each field is written in one scheme now and in the other then.
        indexed = VolatileHash(connect_redis(where.url), "sessions", scheme="sorted-set")
        self.hashes = [where.hash(), indexed]
        self.known = {f"{number}-{n}": Known() for n in range(fields)}
        self.names = [*self.known]
        self.random = random.Random(number)
        self.written = self.read = self.was_live = self.was_over = 0

    @property
    def hash(self) -> VolatileHash:
        return self.random.choice(self.hashes)

    def work(self, until: float) -> None:
        """Works until then, and on until it has judged enough: on a slow machine that takes longer."""
        for at in range(0, len(self.names), BATCH):
            self.set(self.names[at : at + BATCH])
        enough = len(self.names) / 10
        while monotonic() < until or min(self.was_live, self.was_over) <= enough:
            names = self.random.sample(self.names, BATCH)
            match self.random.randrange(10):
                case 0:
                    self.renew(names[0])
                case 1:
                    self.delete(names[:3])
                case _:
                    self.set(names)
            self.check(self.random.sample(self.names, BATCH))

    def set(self, names: Sequence[str]) -> None:
        ttl_s = self.random.choice([0.001, 0.02, 0.1, 0.3, 5.0, 600.0])
        value = f"{self.written}".encode()
        before = monotonic()
        self.hash.hset_many(dict.fromkeys(names, value), ttl_s)
        self.note(names, value, before, ttl_s)

    def renew(self, name: str) -> None:
        ttl_s = self.random.choice([0.02, 0.3, 600.0])
        known, before = self.known[name], monotonic()
        is_live = self.hash.hexpire(name, ttl_s)
        self.judge(name, known, before, is_live=is_live)
        if is_live:
            self.note([name], known.value, before, ttl_s)

    def delete(self, names: Sequence[str]) -> None:
        self.hash.hdel(*names)
        self.known.update({name: Known() for name in names})

    def note(self, names: Sequence[str], value: bytes, before: float, ttl_s: float) -> None:
        live_until = before + ttl_s - slack_s(ttl_s)
        over_from = monotonic() + ttl_s + slack_s(ttl_s)
        self.known.update({name: Known(value, live_until, over_from) for name in names})
        self.written += len(names)

    def check(self, names: Sequence[str]) -> None:
        before = monotonic()
        for name, value in zip(names, self.hash.hmget(*names), strict=True):
            known = self.known[name]
            assert value in (None, known.value), "an older value came back"
            self.judge(name, known, before, is_live=value is not None)

    def judge(self, name: str, known: Known, before: float, *, is_live: bool) -> None:
        """Whether what was seen between ``before`` and now can be."""
        if monotonic() < known.live_until:
            assert is_live, f"{name} is missing {known.live_until - monotonic():.4f} s too early"
            self.was_live += 1
        elif before >= known.over_from:
            assert not is_live, f"{name} is there {before - known.over_from:.4f} s too long"
            self.was_over += 1
        self.read += 1


def run(where: Where, plain: RedisClient, fields: int, seconds: float) -> list[Writer]:
    """Runs the writers, two recruits and one that compares hash and index."""
    stop = Event()
    recruits = [where.hash() for _ in range(2)]
    writers = [Writer(where, number, fields // WRITERS) for number in range(WRITERS)]

    def recruit(own: VolatileHash) -> int:
        collected = 0
        while not stop.wait(0.001):
            collected += own.gc(random.choice([1, 5, 50]))
        return collected

    def compare() -> int:
        rounds = 0
        while not (stop.wait(seconds / 20) and rounds):
            assert plain.eval(DISAGREEING, 2, FIELDS, TIMES, where.scheme) == 0
            rounds += 1
        return rounds

    with ThreadPoolExecutor(WRITERS + 3) as threads:
        others = [threads.submit(recruit, own) for own in recruits] + [threads.submit(compare)]
        until = monotonic() + seconds
        working = [threads.submit(writer.work, until) for writer in writers]
        try:
            for each in working:
                each.result()
        finally:
            stop.set()
        assert others[-1].result() > 0
        print(f"collected by recruits: {others[0].result() + others[1].result():,}")  # noqa: T201
    for own in recruits:
        own.close()
    return writers


def check_the_end(plain: RedisClient, writers: Sequence[Writer]) -> None:
    """At the end the hash holds what it should, and nothing that is over is left for ever."""
    any_hash = writers[0].hash
    before = monotonic()
    found = any_hash.hgetall()
    for writer in writers:
        for name, known in writer.known.items():
            value = found.pop(name.encode(), None)
            assert value in (None, known.value)
            writer.judge(name, known, before, is_live=value is not None)
    assert found == {}
    while any_hash.gc(1000):
        pass
    scores = plain.zcount(TIMES, "-inf", (plain.time()[0] - 1) * 1000)
    assert scores == 0
    for writer in writers:
        for each in writer.hashes:
            each.close()


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        pytest.param(800, 0.2, id="800 fields"),
        pytest.param(200_000, 60.0, id="200,000 fields", marks=pytest.mark.storm),
    ],
)
@pytest.mark.timeout(600)
def test_no_live_field_is_missing_and_none_that_is_over_returned(
    where: Where, plain: RedisClient, fields: int, seconds: float
) -> None:
    writers = run(where, plain, fields, seconds)
    check_the_end(plain, writers)

    written, read = (sum(getattr(w, name) for w in writers) for name in ("written", "read"))
    live, over = (sum(getattr(w, name) for w in writers) for name in ("was_live", "was_over"))
    print(f"{written:,} written, {read:,} read: {live:,} had to be live, {over:,} over")  # noqa: T201
    assert min(live, over) > fields / 10
