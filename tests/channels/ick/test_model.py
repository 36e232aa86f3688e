"""Thousands of random steps of the six operations, by Penstock and by Redis::Ick on the same keys, against a plain model."""

from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fixtures.redis_ick import RedisIck
from penstock.clients import DirtyList

KEY = "ride-index"
MEMBERS = st.sampled_from([b"", b"a", b"b", b"c", b"\x00", b"\xff", b"{k}", b"7", b"8", b"9"])
SCORES = st.integers(-3, 9).map(lambda number: number / 2)
MARKS = st.lists(st.tuples(MEMBERS, SCORES), max_size=8)
SIZES = st.integers(0, 6)

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


class Model(RuleBasedStateMachine):
    """The Ick in Redis, and a model of it in two dictionaries."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.ours = DirtyList(self.client, KEY)
        self.rubys = RedisIck(self.client, KEY)
        self.exists = False
        self.dirty: Set = {}
        self.reserved: Set = {}

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
        self.exists, self.dirty, self.reserved = False, {}, {}

        assert self.ours.delete(unlink=unlink) == keys

    @invariant()
    def redis_matches_the_model(self) -> None:
        stats = self.ours.stats()

        assert (stats is not None) == self.exists
        for span, members in ((stats.dirty, self.dirty), (stats.reserved, self.reserved)) if stats else ():
            scores = sorted(members.values())
            assert span.size == len(scores)
            assert [span.lowest, span.highest] == ([scores[0], scores[-1]] if scores else [None] * 2)
        assert self.client.zrange(self.ours.keys.dirty, 0, -1, withscores=True) == ordered(self.dirty)

    def _exchange(self, size: int, done: list[bytes], *, backwash: bool) -> tuple[int, list[tuple[bytes, float]]]:
        committed = sum(self.reserved.pop(member, None) is not None for member in done)
        if backwash:
            move_lowest(self.reserved, self.dirty, len(self.dirty) + len(self.reserved) + 1)
        move_lowest(self.dirty, self.reserved, size)
        self.exists = True
        return committed, ordered(self.reserved)[:size]


def check(client: redis.Redis, *, examples: int) -> None:
    class Checked(Model):
        pass

    Checked.client = client
    run_state_machine_as_test(Checked, settings=settings(max_examples=examples, stateful_step_count=50))


@pytest.mark.parametrize("examples", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_the_six_operations_match_a_plain_model(redis_client: redis.Redis, examples: int) -> None:
    check(redis_client, examples=examples)


@pytest.mark.storm
@pytest.mark.timeout(600)
def test_the_six_operations_match_a_plain_model_over_long_runs(redis_client: redis.Redis) -> None:
    check(redis_client, examples=1_500)
