"""The six operations behave as those of Redis::Ick."""

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.channels.ick import operations
from penstock.channels.ick.dirty_list import add_each
from penstock.channels.ick.operations import Added, Exchanged, Member, Score, ScoreSpan
from penstock.clients import DirtyList, QueuedDirtyList
from penstock.errors import AppendRefused, InvalidIckCall, ServerUnavailable

NOTHING = ScoreSpan(0, None, None)


def names(marks: list[tuple[bytes, float]]) -> list[str]:
    return [member.decode() for member, _ in marks]


def sizes(ick: DirtyList) -> tuple[int, int, int]:
    """Dirty, reserved, total."""
    stats = ick.stats()
    assert stats is not None
    return stats.dirty.size, stats.reserved.size, stats.total.size


@pytest.mark.parametrize("unlink", [True, False])
def test_on_a_missing_ick_every_operation_has_nothing_to_do(
    ick: DirtyList, redis_client: redis.Redis, *, unlink: bool
) -> None:
    redis_client.config_resetstat()
    assert ick.delete(unlink=unlink) == 0
    calls: Any = redis_client.info("commandstats")
    assert [name in calls for name in ("cmdstat_unlink", "cmdstat_del")] == [unlink, not unlink]
    assert ick.stats() is None
    assert ick.add({}) == Added(0, 0)
    assert ick.reserve() == []
    assert ick.commit([]) == 0
    assert ick.exchange(0, []) == Exchanged(0, [])


def test_no_key_has_a_time_to_live(ick: DirtyList, redis_client: redis.Redis) -> None:
    ick.add({"a": 1, "b": 2})
    ick.reserve(1)

    keys = redis_client.keys()
    assert len(keys) == 3
    assert {redis_client.ttl(key) for key in keys} == {-1}


def test_stats_returns_sizes_and_scores_of_each_set(ick: DirtyList) -> None:
    ick.add({"a": 5, "b": 4.4, "c": 6.6})
    waiting = ick.stats()
    ick.reserve(2)
    half = ick.stats()
    ick.reserve(3)
    taken = ick.stats()
    ick.commit(["a", "b", "c"])
    drained = ick.stats()

    assert waiting is not None
    assert half is not None
    assert taken is not None
    assert drained is not None
    assert waiting.keys.version == "ride-index"
    assert waiting.keys.dirty == "ride-index/ick/{ride-index}/pset"
    assert waiting.keys.reserved == "ride-index/ick/{ride-index}/cset"
    assert waiting.format == "ick.v1"
    assert (waiting.dirty, waiting.reserved) == (ScoreSpan(3, 4.4, 6.6), NOTHING)
    assert (half.dirty, half.reserved) == (ScoreSpan(1, 6.6, 6.6), ScoreSpan(2, 4.4, 5.0))
    assert half.total == ScoreSpan(3, 4.4, 6.6)
    assert (taken.dirty, taken.reserved) == (NOTHING, ScoreSpan(3, 4.4, 6.6))
    assert (drained.dirty, drained.reserved, drained.total) == (NOTHING, NOTHING, NOTHING)


def test_add_and_reserve_take_and_return_values_like_zadd_and_zrange(ick: DirtyList, redis_client: redis.Redis) -> None:
    marks = {f"m{i * 7 % 100}": (i * 31 % 57) / 8 for i in range(100)}
    redis_client.zadd("plain", marks)
    ick.add(marks)

    assert ick.reserve(60) == redis_client.zrange("plain", 0, 59, withscores=True)


@given(score=st.floats(allow_nan=False, allow_infinity=False))
def test_a_score_round_trips_exactly(ick: DirtyList, score: float) -> None:
    ick.delete()
    ick.add({"a": score})
    waiting = ick.stats()
    reserved = ick.reserve(1)
    taken = ick.stats()
    ick.reserve(0, backwash=True)

    assert reserved == [(b"a", score)]
    assert getattr(waiting, "dirty", None) == ScoreSpan(1, score, score)
    assert taken is not None
    assert taken.reserved == taken.total == ScoreSpan(1, score, score)
    assert ick.reserve(1, backwash=True) == [(b"a", score)]


def test_scores_that_differ_in_the_last_bit_are_distinguished(ick: DirtyList) -> None:
    score = 1573000000.1234567
    ick.add({"a": score})

    assert ick.add({"a": math.nextafter(score, math.inf)}) == Added(0, 0)
    assert ick.add({"a": math.nextafter(score, 0)}) == Added(0, 1)


@pytest.mark.parametrize(
    ("score", "stored"),
    [
        (7, 7.0),
        (-0.0, 0.0),
        (123456789012345678, 123456789012345680.0),
        (Decimal("1573000000.1234567"), 1573000000.1234567),
        (Fraction(1, 3), 1 / 3),
    ],
)
def test_any_finite_number_is_a_score(ick: DirtyList, score: Any, stored: float) -> None:
    ick.add({"a": score})

    assert ick.reserve(1) == [(b"a", stored)]


@pytest.mark.parametrize(
    "score", [math.nan, math.inf, -math.inf, 10**400, Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity")]
)
def test_nan_and_infinities_are_refused_before_anything_is_written(
    ick: DirtyList, redis_client: redis.Redis, score: Any
) -> None:
    with pytest.raises(InvalidIckCall, match=r"ride-index: member 'b' has the score .*finite"):
        ick.add([("a", 1), ("b", score)])

    assert redis_client.dbsize() == 0


@pytest.mark.parametrize(
    "marks",
    [
        {"a": "1"},
        {"a": None},
        {"a": True},
        {"a": 1j},
        {1: 1},
        {None: 1},
        {"\ud800": 1},
        ["a", 1],
        ["ab"],
        [("a", 1, 2)],
        [["a", 1]],
    ],
)
def test_an_invalid_mark_is_refused_before_anything_is_written(
    ick: DirtyList, redis_client: redis.Redis, marks: Any
) -> None:
    with pytest.raises(InvalidIckCall, match="ride-index: "):
        ick.add(marks)

    assert redis_client.dbsize() == 0


@pytest.mark.parametrize("size", [-1, 1.0, None, "", "1", [], True])
def test_a_size_is_a_whole_number_of_at_least_zero(ick: DirtyList, size: Any) -> None:
    with pytest.raises(InvalidIckCall, match="size"):
        ick.reserve(size)
    with pytest.raises(InvalidIckCall, match="size"):
        ick.exchange(size, [])


@pytest.mark.parametrize("members", ["ab", b"ab", [5], [None], [["a"]]])
def test_only_valid_members_can_be_committed(ick: DirtyList, members: Any) -> None:
    with pytest.raises(InvalidIckCall, match="ride-index: "):
        ick.commit(members)


@pytest.mark.parametrize("key", [None, 0, b"k"])
def test_a_key_is_text(redis_client: redis.Redis, key: Any) -> None:
    with pytest.raises(InvalidIckCall, match="not text"):
        DirtyList(redis_client, key)


@given(members=st.sets(st.binary(max_size=20), min_size=1))
def test_a_member_may_be_any_bytes(ick: DirtyList, members: set[bytes]) -> None:
    ick.delete()
    ick.add(dict.fromkeys(members, 1))

    assert ick.reserve(len(members)) == [(member, 1.0) for member in sorted(members)]
    assert ick.commit(members) == len(members)


def test_a_client_that_decodes_replies_gets_the_same_bytes(redis_url: str) -> None:
    marks: dict[Member, Score] = {b"\xff\x00": 1.5, "é": 2}
    for options in ({"decode_responses": True}, {"protocol": 3}):
        with redis.Redis.from_url(redis_url, **options) as client:
            ick = DirtyList(client, "ride-index")
            ick.add(marks)
            assert ick.reserve(2) == [(b"\xff\x00", 1.5), ("é".encode(), 2.0)]
            assert getattr(ick.stats(), "format", None) == "ick.v1"
            ick.delete()


@pytest.mark.parametrize("count", [10, 3499, 3500, 3501, 7999, 8010, 20_000])
def test_a_call_takes_thousands_of_members(ick: DirtyList, count: int) -> None:
    marks = [(f"{i:06d}".encode(), float(i)) for i in range(count)]

    assert ick.add(marks) == Added(count, 0)
    assert ick.reserve(count) == marks
    assert ick.reserve(count, backwash=True) == marks
    assert ick.commit(member for member, _ in marks) == count
    assert ick.reserve(count) == []
    assert ick.commit(member for member, _ in marks) == 0


def test_no_script_call_carries_more_than_one_slice(ick: DirtyList, redis_client: redis.Redis) -> None:
    count = operations.SLICE * 3 + 1
    redis_client.config_resetstat()

    ick.add({str(i): i for i in range(count)})
    assert redis_client.info("commandstats")["cmdstat_zadd"]["calls"] == 4


def test_marks_for_many_icks_go_in_one_round_trip(redis_client: redis.Redis) -> None:
    icks = [DirtyList(redis_client, f"index/{shard}") for shard in range(4)]

    added = add_each(redis_client, [(ick.keys, {"a": 1, "b": shard}) for shard, ick in enumerate(icks)])

    assert added == [Added(2, 0)] * 4
    assert [ick.reserve(1) for ick in icks[:2]] == [[(b"b", 0.0)], [(b"a", 1.0)]]
    assert add_each(redis_client, []) == []


def test_a_script_that_the_server_has_forgotten_is_loaded_again(ick: DirtyList, redis_client: redis.Redis) -> None:
    """Guarantee 19."""
    ick.add({"a": 1})
    redis_client.script_flush()

    assert ick.add({"a": 0, "b": 1}) == Added(1, 1)
    redis_client.script_flush()
    assert names(ick.reserve(5)) == ["a", "b"]


@pytest.fixture
def no_memory(redis_client: redis.Redis) -> Iterator[Callable[[], object]]:
    """Fills the server's memory until the end of the test."""
    yield lambda: redis_client.config_set("maxmemory", "1")
    redis_client.config_set("maxmemory", "0")


def test_a_server_without_memory_accepts_no_marks_and_writes_nothing_partially(
    ick: DirtyList, redis_client: redis.Redis, no_memory: Callable[[], object]
) -> None:
    """Guarantee 13."""
    no_memory()

    with pytest.raises(AppendRefused, match=r"adding to ride-index: .*memory"):
        ick.add({"a": 1})
    assert redis_client.dbsize() == 0


def test_a_server_without_memory_still_reserves(ick: DirtyList, no_memory: Callable[[], object]) -> None:
    """Guarantee 13: otherwise no consumer could ever empty the Ick."""
    ick.add({"a": 1, "b": 2, "c": 3})
    no_memory()

    assert names(ick.reserve(1)) == ["a"]
    assert names(ick.exchange(1, ["a"]).marks) == ["b"]
    assert names(ick.reserve(2, backwash=True)) == ["b", "c"]
    assert ick.commit(["b", "c"]) == 2


def test_an_unreachable_server_raises_server_unavailable() -> None:
    client = redis.Redis(unix_socket_path="nowhere.sock", retry=Retry(NoBackoff(), 0))

    with pytest.raises(ServerUnavailable):
        DirtyList(client, "ride-index").add({"a": 1})


def test_what_is_reserved_stays_so_unless_backwash_is_asked_for(ick: DirtyList, redis_client: redis.Redis) -> None:
    """Also for calls that are queued."""
    ick.add({"late": 5})
    ick.reserve(1)
    ick.add({"early": 1})
    pipeline = redis_client.pipeline()
    queued = QueuedDirtyList(pipeline, "ride-index")
    queued.exchange(1, [])
    queued.reserve(1)

    late = [(b"late", 5.0)]
    assert [ick.exchange(1, []).marks, ick.reserve(1)] == [late, late]
    exchanged, reserved = pipeline.execute()
    assert [exchanged.marks, reserved] == [late, late]
    assert ick.exchange(1, [], backwash=True).marks == [(b"early", 1.0)]
