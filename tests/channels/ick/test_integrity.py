"""Every operation refuses a damaged Ick with a helpful error, and ``repair`` repairs it."""

from collections.abc import Callable
from typing import Any

import pytest
import redis

from penstock.clients import DirtyList, QueuedDirtyList, Reservation, Reservations, repair
from penstock.errors import DamagedIck

KEY = "ride-index"
PSET, CSET = f"{KEY}/ick/{{{KEY}}}/pset", f"{KEY}/ick/{{{KEY}}}/cset"
FENCE, HELD = f"{KEY}/ick/{{{KEY}}}/fence", f"{KEY}/ick/{{{KEY}}}/held"


def overwrite(key: str, write: Callable[[redis.Redis], object]) -> Callable[[redis.Redis], None]:
    def damage(client: redis.Redis) -> None:
        client.delete(key)
        write(client)

    return damage


def no_version_beside_the_reserved(client: redis.Redis) -> None:
    client.delete(KEY, PSET)


DAMAGES = {
    "version is a hash": (
        overwrite(KEY, lambda client: client.hset(KEY, "a", "b")),
        f"{KEY}: expected string, found hash",
        {b"d": 4.0, b"r": 1.0},
    ),
    "version is gone": (
        lambda client: client.delete(KEY),
        f"{KEY}: expected ick.v1 beside members, found none",
        {b"d": 4.0, b"r": 1.0},
    ),
    "version is gone and nothing is dirty": (
        no_version_beside_the_reserved,
        f"{KEY}: expected ick.v1 beside members, found none",
        {b"r": 1.0},
    ),
    "version is junk": (
        overwrite(KEY, lambda client: client.set(KEY, "junk")),
        f'{KEY}: expected ick.v1, found "junk"',
        {b"d": 4.0, b"r": 1.0},
    ),
    "version is empty": (
        overwrite(KEY, lambda client: client.set(KEY, "")),
        f'{KEY}: expected ick.v1, found ""',
        {b"d": 4.0, b"r": 1.0},
    ),
    "dirty is a string": (
        overwrite(PSET, lambda client: client.set(PSET, "text")),
        f"{PSET}: expected zset, found string",
        {b"r": 1.0},
    ),
    "reserved is a string": (
        overwrite(CSET, lambda client: client.set(CSET, "text")),
        f"{CSET}: expected zset, found string",
        {b"d": 4.0},
    ),
}


@pytest.fixture(params=DAMAGES)
def damaged(
    request: pytest.FixtureRequest, ick: DirtyList, redis_client: redis.Redis
) -> tuple[str, dict[bytes, float]]:
    """A damaged Ick with a dirty and a reserved member: the error text, and the members that remain."""
    ick.add({"r": 1, "d": 4})
    ick.reserve(1)
    damage, text, left = DAMAGES[request.param]
    damage(redis_client)
    return text, left


def dump(client: redis.Redis) -> dict[bytes, bytes | None]:
    keys: list[Any] = client.keys()
    return {key: client.dump(key) for key in keys}


OPERATIONS: dict[str, Callable[[DirtyList], object]] = {
    "add": lambda ick: ick.add({"a": 1}),
    "add nothing": lambda ick: ick.add({}),
    "reserve": lambda ick: ick.reserve(1),
    "reserve with backwash": lambda ick: ick.reserve(1, backwash=True),
    "commit": lambda ick: ick.commit(["r"]),
    "exchange": lambda ick: ick.exchange(1, ["r"]),
    "stats": lambda ick: ick.stats(),
    "delete": lambda ick: ick.delete(),
    "unlink": lambda ick: ick.delete(unlink=True),
    "reserve, fenced": lambda ick: Reservations(ick._client, KEY).reserve(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_names_the_key_the_damage_and_the_repair_and_writes_nothing(
    damaged: tuple[str, dict[bytes, float]], operation: str, ick: DirtyList, redis_client: redis.Redis
) -> None:
    before = dump(redis_client)

    with pytest.raises(DamagedIck) as raised:
        OPERATIONS[operation](ick)

    assert str(raised.value).startswith(f"{damaged[0]}; nothing was written. ")
    assert "repair" in str(raised.value)
    assert dump(redis_client) == before


def test_in_a_pipeline_the_error_is_the_same_and_other_calls_return_their_results(
    damaged: tuple[str, dict[bytes, float]], redis_client: redis.Redis
) -> None:
    pipeline = redis_client.pipeline()
    QueuedDirtyList(pipeline, KEY).stats()
    QueuedDirtyList(pipeline, "intact").add({"a": 1})

    error, added = pipeline.execute(raise_on_error=False)
    assert isinstance(error, redis.ResponseError)
    assert damaged[0] in str(error)
    assert "repair" in str(error)
    assert added.new == 1


def test_repair_keeps_every_member(
    damaged: tuple[str, dict[bytes, float]], ick: DirtyList, redis_client: redis.Redis
) -> None:
    before = dump(redis_client)
    planned = repair(redis_client, KEY, dry_run=True)
    assert dump(redis_client) == before
    done = repair(redis_client, KEY)

    assert [(damage.key, damage.found) for damage in done] == [(damage.key, damage.found) for damage in planned]
    assert len(done) == 1
    assert dict(ick.reserve(9, backwash=True)) == damaged[1]
    assert repair(redis_client, KEY) == []
    # Foreign content was moved unchanged.
    for damage in done:
        if damage.moved_to is not None:
            assert redis_client.dump(damage.moved_to) == before[damage.key.encode()]
            assert ick.keys.dirty.split("pset")[0] in damage.moved_to
    assert done[0].may_have_lost == (done[0].key in {PSET, CSET})


def test_several_faults_are_repaired_at_once(ick: DirtyList, redis_client: redis.Redis) -> None:
    redis_client.set(PSET, "1")
    redis_client.set(CSET, "2")
    redis_client.set(FENCE, "3")
    redis_client.set(HELD, "4")
    redis_client.hset(KEY, "a", "b")

    assert len(repair(redis_client, KEY)) == 5
    assert ick.add({"a": 1}).new == 1
    assert isinstance(Reservations(redis_client, KEY).reserve(), Reservation)


def test_an_intact_or_absent_ick_needs_no_repair(ick: DirtyList, redis_client: redis.Redis) -> None:
    assert repair(redis_client, KEY) == []
    assert redis_client.dbsize() == 0
    ick.add({"a": 1, "b": 2})
    ick.reserve(1)
    Reservations(redis_client, KEY, adopt=False).reserve()
    before = dump(redis_client)

    assert repair(redis_client, KEY) == []
    assert dump(redis_client) == before


def test_a_later_format_is_left_alone(ick: DirtyList, redis_client: redis.Redis) -> None:
    redis_client.set(KEY, "ick.v2")
    redis_client.zadd(PSET, {"a": 1})
    before = dump(redis_client)

    with pytest.raises(DamagedIck, match=r"ick\.v2.*update"):
        repair(redis_client, KEY)
    assert dump(redis_client) == before


@pytest.mark.parametrize("key", [FENCE, HELD])
def test_a_damaged_fence_stops_fenced_calls_only(ick: DirtyList, redis_client: redis.Redis, key: str) -> None:
    ick.add({"a": 1})
    redis_client.set(key, "text")
    fenced = Reservations(redis_client, KEY)

    with pytest.raises(DamagedIck, match="found string"):
        fenced.reserve()
    assert ick.reserve(1) == [(b"a", 1.0)]
    stats = ick.stats()
    assert stats is not None
    assert stats.held.size == 0

    assert [damage.key for damage in repair(redis_client, KEY)] == [key]
    again = fenced.reserve()
    assert isinstance(again, Reservation)
    assert again.members == [b"a"]


def test_when_the_fence_is_lost_its_held_members_are_restored(ick: DirtyList, redis_client: redis.Redis) -> None:
    ick.add({"a": 1})
    Reservations(redis_client, KEY).reserve()
    redis_client.delete(FENCE)

    again = Reservations(redis_client, KEY).reserve()
    assert isinstance(again, Reservation)
    assert again.members == [b"a"]


def test_infinite_scores_written_by_others_are_shown_unchanged(ick: DirtyList, redis_client: redis.Redis) -> None:
    ick.add({"a": 1})
    redis_client.zadd(PSET, {"first": "-inf", "last": "inf"})

    stats = ick.stats()
    assert stats is not None
    assert (stats.dirty.lowest, stats.dirty.highest) == (float("-inf"), float("inf"))
    assert ick.reserve(3) == [(b"first", float("-inf")), (b"a", 1.0), (b"last", float("inf"))]
    assert ick.reserve(3, backwash=True)[2] == (b"last", float("inf"))
