"""Reservations: lowest scores first, safe to repeat, taken over without loss."""

from typing import Any

import pytest
import redis

from channels.ick.conftest import reserved
from fixtures.proxy import Harm, Proxy, behind
from penstock.channels.ick.reservations import HolderWatch
from penstock.clients import Busy, Committed, DirtyList, Released, Reservations, Superseded, repair
from penstock.errors import InvalidIckCall, ServerUnavailable

KEY = "ride-index"


@pytest.fixture
def consumer(redis_client: redis.Redis) -> Reservations:
    return Reservations(redis_client, KEY, holder="ours", size=3)


@pytest.fixture
def rival(redis_client: redis.Redis) -> Reservations:
    return Reservations(redis_client, KEY, holder="rival", size=3)


def held_by_server(client: redis.Redis) -> dict[bytes, float]:
    found: Any = client.zrange(f"{KEY}/ick/{{{KEY}}}/held", 0, -1, withscores=True)
    return dict(found)


def test_scores_and_members_come_back_unchanged(ick: DirtyList, consumer: Reservations) -> None:
    marks = ((b"\xff\x00", -1e-300), (b"", 1573000000.1234567))
    ick.add(marks)

    assert reserved(consumer.reserve()).marks == marks


@pytest.mark.parametrize("has_version", [True, False])
def test_release_makes_the_rest_dirty_with_their_old_scores(
    ick: DirtyList, consumer: Reservations, rival: Reservations, redis_client: redis.Redis, *, has_version: bool
) -> None:
    """Without a version beside them, these members would be a damage."""
    ick.add({"a": 1, "b": 2, "c": 3})
    mine = reserved(consumer.reserve())
    if has_version:
        ick.add({"b": 9})
    else:
        redis_client.delete(consumer.keys.version)
        assert [*repair(redis_client, KEY, dry_run=True)] == [], "what is held alone needs none"

    assert consumer.release(mine, ["a"]) == Released(1, 2)
    assert reserved(rival.reserve()).marks == ((b"b", 2.0), (b"c", 3.0))


def test_a_reservation_that_is_replaced_makes_a_missing_ick(
    ick: DirtyList, consumer: Reservations, redis_client: redis.Redis
) -> None:
    ick.add({"a": 1})
    consumer.reserve()
    redis_client.delete(consumer.keys.version)

    assert reserved(consumer.reserve()).members == [b"a"]
    assert ick.stats() is not None


def test_a_release_that_returns_nothing_makes_no_ick(
    ick: DirtyList, consumer: Reservations, redis_client: redis.Redis
) -> None:
    """What has looked for a missing Ick finds it missing still."""
    ick.add({"a": 1})
    mine = reserved(consumer.reserve())
    redis_client.delete(consumer.keys.version)

    assert consumer.release(mine, ["a"]) == Released(1, 0)
    assert ick.stats() is None


def test_a_smaller_size_returns_the_surplus_members(
    ick: DirtyList, consumer: Reservations, redis_client: redis.Redis
) -> None:
    ick.add({f"m{i}": i for i in range(5)})
    mine = reserved(consumer.reserve())
    ick.add({"m2": 0.5})
    smaller = Reservations(redis_client, KEY, size=1)
    smaller.holder = consumer.holder

    less = reserved(smaller.exchange(mine, []))
    assert less.members == [b"m0"]
    assert held_by_server(redis_client) == {b"m0": 0.0}
    assert ick.reserve(9)[:2] == [(b"m2", 0.5), (b"m1", 1.0)]


@pytest.mark.parametrize("adopt", [True, False])
def test_a_consumer_that_waits_writes_nothing(ick: DirtyList, redis_client: redis.Redis, *, adopt: bool) -> None:
    """Whether or not a plain reserve has taken what it does not adopt."""
    consumer = Reservations(redis_client, KEY, adopt=adopt)
    ick.add({} if adopt else {"p": 0})
    ick.reserve(1)
    mine = reserved(consumer.reserve())
    changes = redis_client.info("persistence")["rdb_changes_since_last_save"]

    for _ in range(3):
        mine = reserved(consumer.exchange(mine))
    assert redis_client.info("persistence")["rdb_changes_since_last_save"] == changes

    ick.add({"a": 1})
    ick.reserve(int(adopt))
    mine = reserved(consumer.exchange(mine))
    assert mine.members == [b"a"]
    last = reserved(consumer.exchange(mine))
    assert (last.number, last.members, last.committed) == (mine.number + 1, [], 1)


def test_adopted_and_dirty_members_are_taken_by_their_scores(ick: DirtyList, redis_client: redis.Redis) -> None:
    """As numbers: as texts, 10 comes before 9."""
    ick.add({"a": 10, "c": 11})
    ick.reserve(2)
    ick.add({"b": 9, "d": 100})
    consumer = Reservations(redis_client, KEY, size=2)

    assert reserved(consumer.reserve()).members == [b"b", b"a"]


@pytest.mark.parametrize("harm", list(Harm))
def test_after_a_lost_request_or_reply_the_same_call_gives_the_same_reservation(
    ick: DirtyList, redis_url: str, redis_proxy: Proxy, harm: Harm
) -> None:
    """Guarantee 1."""
    ick.add({"a": 1, "b": 2, "c": 3, "d": 4})
    with redis.Redis.from_url(behind(redis_proxy, redis_url), retry=None) as client:
        consumer = Reservations(client, KEY, size=2)

        def lossy(call: Any) -> Any:
            redis_proxy.harm(b"EVALSHA", harm)
            with pytest.raises(ServerUnavailable):
                call()
            return call()

        # Load the script first, so that the proxy breaks the call itself.
        Reservations(ick._client, "other").reserve()
        first = reserved(lossy(consumer.reserve))
        assert (first.number, first.members) == (1, [b"a", b"b"])
        ick.add({"a": 5})
        second = reserved(lossy(lambda: consumer.exchange(first)))
        assert (second.number, second.members, second.committed) == (2, [b"c", b"d"], 2)
        third = reserved(lossy(lambda: consumer.exchange(second, ["c"])))
        assert (third.number, third.marks) == (3, ((b"d", 4.0), (b"a", 5.0)))
        assert isinstance(lossy(lambda: consumer.commit(third, ["d"])), Committed)
        assert isinstance(lossy(lambda: consumer.release(third)), Released | Superseded)
    assert ick.reserve(9) == [(b"a", 5.0)]


def test_repeating_an_exchange_with_other_members_done_is_superseded(ick: DirtyList, consumer: Reservations) -> None:
    """Otherwise a newly reserved member could be taken for one that was left over."""
    ick.add({"a": 1, "b": 2})
    mine = reserved(consumer.reserve())
    ick.add({"a": 3})
    consumer.exchange(mine, ["a"])  # the reply is lost

    assert isinstance(consumer.exchange(mine, ["b"]), Superseded)
    assert reserved(consumer.exchange(mine, ["a"])).marks == ((b"b", 2.0), (b"a", 3.0))


def test_a_takeover_gets_all_members_and_only_from_the_reservation_that_was_seen(
    ick: DirtyList, consumer: Reservations, rival: Reservations, redis_client: redis.Redis
) -> None:
    ick.add({"a": 1, "b": 2})
    first = reserved(consumer.reserve())
    seen = rival.reserve()
    assert isinstance(seen, Busy)
    consumer.exchange(first, ["a"])

    # The holder was alive after all: the reservation that was seen is no longer current.
    assert isinstance(rival.reserve(in_place_of=seen), Busy)

    seen = rival.reserve()
    assert isinstance(seen, Busy)
    theirs = reserved(rival.reserve(in_place_of=seen))
    assert theirs.members == [b"b"]
    third = Reservations(redis_client, KEY)
    assert isinstance(third.reserve(in_place_of=seen), Busy)


def test_a_holder_is_stale_when_it_has_sent_no_heartbeat_for_long_enough(
    ick: DirtyList, consumer: Reservations, rival: Reservations
) -> None:
    """Guarantee 20: only the watcher's own clock is read, and only to measure durations."""
    now = 0.0
    watch = HolderWatch(10, clock=lambda: now)
    ick.add({"a": 1})
    mine = reserved(consumer.reserve())

    def is_stale() -> bool:
        busy = rival.reserve()
        assert isinstance(busy, Busy)
        return watch.is_stale(busy)

    assert not is_stale()
    now = 9.9
    assert not is_stale()
    consumer.commit(mine, [])  # a heartbeat
    assert not is_stale()
    now = 19.75
    assert not is_stale()
    now = 20.0
    assert is_stale()


@pytest.mark.parametrize("count", [3_499, 3_501, 12_000])
def test_a_reservation_may_have_thousands_of_members(ick: DirtyList, redis_client: redis.Redis, count: int) -> None:
    marks = tuple((f"{i:06d}".encode(), float(i)) for i in range(count))
    ick.add(marks)
    consumer = Reservations(redis_client, KEY, size=count)

    mine = reserved(consumer.reserve())
    assert mine.marks == marks
    half = reserved(consumer.exchange(mine, mine.members[::2]))
    assert half.marks == marks[1::2]
    again = reserved(Reservations(redis_client, KEY, size=count).reserve(in_place_of=half))
    assert again.marks == marks[1::2]


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_a_reservation_has_a_size_of_at_least_one(redis_client: redis.Redis, size: Any) -> None:
    with pytest.raises(InvalidIckCall, match="from 1 on"):
        Reservations(redis_client, KEY, size=size)


@pytest.mark.parametrize("rounds", [1, 7])
def test_no_member_starves_however_often_it_becomes_dirty_again(
    ick: DirtyList, consumer: Reservations, rounds: int
) -> None:
    """It keeps the first score it got since it was last reserved, so it is taken within queue / batch reservations."""
    queue = 30
    ick.add({f"m{i:02d}": i for i in range(queue)})
    victim, clock = b"m29", float(queue)
    mine = reserved(consumer.reserve())
    taken = 1
    for _ in range(rounds):
        while victim not in mine.members:
            # All members become dirty again, the victim more often than batches are reserved.
            ick.add([(member, clock + i) for i, member in enumerate([*mine.members, victim, victim])])
            clock += 100
            mine = reserved(consumer.exchange(mine))
            taken += 1
        ick.add({victim: clock})
        mine = reserved(consumer.exchange(mine))
        taken += 1
        assert taken <= queue / 3 + 1
        taken = 0


def test_no_member_starves_with_plain_operations_either(ick: DirtyList) -> None:
    queue, size = 30, 3
    ick.add({f"m{i:02d}": i for i in range(queue)})
    clock, taken = float(queue), 1
    mine = [member for member, _ in ick.reserve(size)]
    while b"m29" not in mine:
        ick.add([(member, clock + i) for i, member in enumerate([*mine, b"m29", b"m29"])])
        clock += 100
        mine = [member for member, _ in ick.exchange(size, mine).marks]
        taken += 1

    assert taken == queue / size
