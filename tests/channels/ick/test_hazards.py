"""Members that plain operations forget and fenced reservations do not.

Each happens with the operations of Redis::Ick, as ``test_model.py`` compares them, and does not with a reservation.
"""

import pytest
import redis

from channels.ick.conftest import reserved
from fixtures.redis_ick import RedisIck
from penstock.clients import Busy, Committed, DirtyList, Reservations, Superseded

KEY = "ride-index"


def everything(ick: DirtyList) -> set[bytes]:
    """All members: dirty, reserved or held."""
    keys = ick.keys
    return {member for key in (keys.dirty, keys.reserved, keys.held) for member in ick._client.zrange(key, 0, -1)}


@pytest.fixture
def ruby(redis_client: redis.Redis) -> RedisIck:
    """A process that uses the plain operations."""
    return RedisIck(redis_client, KEY)


@pytest.fixture
def fenced(redis_client: redis.Redis) -> Reservations:
    return Reservations(redis_client, KEY, holder="ours", size=2)


@pytest.fixture
def other(redis_client: redis.Redis) -> Reservations:
    """A second fenced consumer."""
    return Reservations(redis_client, KEY, holder="other", size=2)


def test_fenced_a_second_reserve_in_flight_learns_who_holds_it(
    ick: DirtyList, fenced: Reservations, other: Reservations
) -> None:
    ick.add({"a": 1})
    mine = reserved(fenced.reserve())
    ick.add({"a": 2})

    busy = other.reserve()
    assert isinstance(busy, Busy)
    assert busy.holder == fenced.holder
    assert fenced.commit(mine, ["a"]) == Committed(1)

    assert everything(ick) == {b"a"}
    assert reserved(fenced.exchange(mine)).marks == ((b"a", 2.0),)


def test_fenced_a_consumer_that_reserves_again_starts_over_and_forgets_nothing(
    ick: DirtyList, fenced: Reservations
) -> None:
    ick.add({"a": 1})
    first = reserved(fenced.reserve())
    ick.add({"a": 2})
    second = reserved(fenced.reserve())

    assert second.marks == ((b"a", 1.0),)
    assert isinstance(fenced.commit(first, ["a"]), Superseded)
    assert everything(ick) == {b"a"}


@pytest.mark.parametrize("backwash", [False, True])
def test_fenced_a_monitor_that_reserves_does_no_harm(
    ick: DirtyList, ruby: RedisIck, fenced: Reservations, *, backwash: bool
) -> None:
    ick.add({"a": 1})
    mine = reserved(fenced.reserve())
    ick.add({"a": 2, "b": 3})

    assert ruby.reserve(5, backwash=backwash) == [(b"a", 2.0), (b"b", 3.0)]
    next_ = reserved(fenced.exchange(mine, ["a"]))

    # Members that the monitor has reserved, and will never commit, are reserved again.
    assert next_.marks == ((b"a", 2.0), (b"b", 3.0))


def test_fenced_a_partial_exchange_keeps_newer_marks_apart(ick: DirtyList, fenced: Reservations) -> None:
    ick.add({"a": 1, "b": 2})
    first = reserved(fenced.reserve())
    ick.add({"a": 3})

    second = reserved(fenced.exchange(first, ["b"]))
    assert second.marks == ((b"a", 1.0),)
    third = reserved(fenced.exchange(second, ["a"]))

    assert third.marks == ((b"a", 3.0),)


def test_fenced_a_zombie_learns_that_it_was_superseded(
    ick: DirtyList, fenced: Reservations, other: Reservations
) -> None:
    ick.add({"a": 1})
    zombies = reserved(fenced.reserve())
    busy = other.reserve()
    assert isinstance(busy, Busy)
    theirs = reserved(other.reserve(in_place_of=busy))
    ick.add({"a": 2})
    again = reserved(other.exchange(theirs))
    assert again.marks == ((b"a", 2.0),)

    for late in (
        fenced.commit(zombies, ["a"]),
        fenced.exchange(zombies),
        fenced.release(zombies, ["a"]),
        fenced.read(zombies),
    ):
        assert isinstance(late, Superseded)
        assert late.holder == other.holder
    assert everything(ick) == {b"a"}
    assert other.read(again) == again


def test_fenced_a_commit_that_is_sent_twice_takes_effect_once(ick: DirtyList, fenced: Reservations) -> None:
    ick.add({"a": 1, "b": 2})
    mine = reserved(fenced.reserve())
    fenced.commit(mine, ["a"])
    ick.add({"a": 3})

    assert fenced.commit(mine, ["a"]) == Committed(0)
    next_ = reserved(fenced.exchange(mine, ["a", "b"]))
    assert isinstance(fenced.commit(mine, ["a"]), Superseded)
    assert next_.marks == ((b"a", 3.0),)


def test_a_plain_consumer_that_commits_whole_batches_can_work_beside_a_fenced_one(
    ick: DirtyList, ruby: RedisIck, fenced: Reservations
) -> None:
    ick.add({"a": 1, "b": 2, "c": 3})
    theirs = ruby.reserve(1)
    mine = reserved(fenced.reserve())  # adopts what the plain consumer has reserved: it is processed twice
    assert theirs == [(b"a", 1.0)]
    assert mine.members == [b"a", b"b"]

    ick.add({"a": 4})
    assert ruby.exchange(1, ["a"]) == [(b"c", 3.0)]
    assert reserved(fenced.exchange(mine)).marks == ((b"c", 3.0), (b"a", 4.0))
    assert ruby.commit(["c"]) == 0
    assert everything(ick) == {b"a", b"c"}


def test_a_fenced_consumer_can_leave_a_plain_consumers_members_to_it(
    ick: DirtyList, ruby: RedisIck, redis_client: redis.Redis
) -> None:
    ick.add({"a": 1, "b": 2})
    ruby.reserve(1)
    beside = Reservations(redis_client, KEY, adopt=False)

    assert reserved(beside.reserve()).members == [b"b"]
    assert ruby.sizes() == (0, 1)


def test_plain_operations_do_not_see_held_members(ick: DirtyList, ruby: RedisIck, fenced: Reservations) -> None:
    ick.add({"a": 1})
    fenced.reserve()

    assert ruby.reserve(5, backwash=True) == []
    assert ruby.commit(["a"]) == 0
    stats = ick.stats()
    assert stats is not None
    assert (stats.held.size, stats.total.size) == (1, 1)
    assert everything(ick) == {b"a"}


def test_two_plain_consumers_forget_beside_a_fenced_one_as_they_do_alone(
    ick: DirtyList, ruby: RedisIck, fenced: Reservations
) -> None:
    """Why the documentation allows only one plain consumer."""
    ick.add({"a": 1})
    ruby.reserve(5)  # one consumer processes it
    ick.add({"a": 2})
    ruby.reserve(5)  # another merges the newer mark into that
    ruby.commit(["a"])

    assert reserved(fenced.reserve()).members == []


def test_fenced_an_exchange_that_is_sent_twice_returns_the_same_reservation(
    ick: DirtyList, fenced: Reservations
) -> None:
    ick.add({"a": 1})
    mine = reserved(fenced.reserve())
    ick.add({"a": 2})
    lost = reserved(fenced.exchange(mine))

    again = reserved(fenced.exchange(mine))

    assert (again.marks, again.number) == (((b"a", 2.0),), lost.number)
    assert everything(ick) == {b"a"}


def test_plain_and_fenced_commits_return_how_many_members_they_found(ick: DirtyList, fenced: Reservations) -> None:
    """Redis::Ick's exchange does not return this number."""
    ick.add({"a": 1, "b": 2, "c": 3})
    ick.reserve(1)

    assert ick.exchange(0, ["a", "c", "never"]).committed == 1
    mine = reserved(fenced.reserve())
    assert reserved(fenced.exchange(mine, ["b", "never"])).committed == 1
