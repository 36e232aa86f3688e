"""When an unusable shard is checked and named again; and a log that has what the journal is about to give out."""

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fixtures.clocks import Clock
from penstock import Log
from penstock.channels.isolation import ShardError
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.errors import AppendRefused, CodecMissing, DamagedIck, DamagedJournal, ForeignLog, UnpublishableRecord
from penstock.observer import Observers, ShardStopped
from penstock.records import Epoch, Offset, Shard, ShardName
from penstock.streaming.publisher import Publisher, SlicePublisher, nearest
from penstock.streaming.sequencer import tick
from penstock.streaming.tails import make_unusable
from penstock.streaming.unpublished import count_missing

SHARD, OTHER = (ShardName("things", Shard(number)) for number in (0, 1))
STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'things', 0, 'k', 'insert', 'thing', '1' FROM generate_series(1, %s)
"""


@pytest.mark.parametrize(
    ("error", "pauses"),
    [
        (ForeignLog("x"), [5, 5, 5, 5, 5, 5]),
        (DamagedIck("x"), [5, 5, 5, 5, 5, 5]),
        (CodecMissing("x"), [5, 5, 5, 5, 5, 5]),
        (DamagedJournal("x"), [5, 10, 20, 40, 60, 60]),
        (UnpublishableRecord("x"), [5, 10, 20, 40, 60, 60]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_shard_is_checked_again_every_few_seconds_and_less_often_if_that_takes_much(
    error: ShardError, pauses: list[int]
) -> None:
    """Whatever the other shard does; once it was usable, all begins anew."""
    clock = Clock()
    unusable = make_unusable(Observers(), clock)
    for _ in range(2):
        assert (SHARD in unusable, unusable.due(), unusable.errors) == (False, [], {})
        for pause in pauses:
            unusable.add(SHARD, error)
            clock.now += 1
            unusable.add(OTHER, error)
            clock.now += pause - 1.001
            assert SHARD not in unusable.due()
            clock.now += 0.001
            assert SHARD in unusable.due()
            assert unusable.errors[SHARD] is error
            with pytest.raises(type(error)) as raised:
                unusable.raise_first()
            assert raised.value is error
        unusable.remove(SHARD)
        assert unusable.errors == {OTHER: error}
        unusable.remove(OTHER)


def test_a_shard_that_is_to_be_checked_now_is_due_at_once() -> None:
    clock = Clock()
    clock.now = 0.0
    unusable = make_unusable(Observers(), clock)
    unusable.add(SHARD, ForeignLog("x"))
    assert unusable.due() == []

    unusable.check_now()
    assert unusable.due() == [SHARD]


def test_an_unusable_shard_is_logged_every_hour_and_observed_once() -> None:
    clock = Clock()
    stopped: list[object] = []
    clock.now = 0.0
    observers = Observers()
    observers.add(stopped.append)
    unusable = make_unusable(observers, clock)
    with capture_logs() as logs:
        for clock.now, shard, reason in [
            (0.0, SHARD, "first"),
            (1.0, OTHER, "first"),
            (59.9, SHARD, "another"),
            (3599.9, SHARD, "first"),
            (3600.0, SHARD, "first"),
            (3600.5, OTHER, "first"),
            (3659.9, SHARD, "another"),
            (3660.0, SHARD, "another"),
        ]:
            unusable.add(shard, ForeignLog(reason))
        unusable.remove(SHARD)
        clock.now = 3719.9
        unusable.add(SHARD, DamagedIck("x"))
        unusable.remove(SHARD)
        clock.now = 3720.0
        unusable.add(SHARD, ForeignLog("another"))

    lines = [(each["shard"], each["reason"].split()[-1]) for each in logs if each["event"] == "shard unusable"]
    assert lines == [
        ("things/0", "first"),
        ("things/1", "first"),
        ("things/0", "first"),
        ("things/0", "another"),
        ("things/0", "another"),
    ]
    assert [each["event"] for each in logs].count("shard usable again") == 2
    assert stopped == [
        ShardStopped("things", 0, "ForeignLog"),
        ShardStopped("things", 1, "ForeignLog"),
        ShardStopped("things", 0, "DamagedIck"),
        ShardStopped("things", 0, "ForeignLog"),
    ]


@pytest.mark.parametrize(
    ("deleted", "hears_tick", "is_damaged"),
    [(0, True, False), (1, True, True), (2, True, True), (0, False, False), (2, False, True), (3, False, True)],
)
def test_an_offset_that_the_log_has_is_not_given_out_again(
    connection: Connection, redis_client: redis.Redis, deleted: int, *, hears_tick: bool, is_damaged: bool
) -> None:
    """Guarantee 3: the newest rows of the journal were deleted; the next record is given the offset of another one."""
    register_channel(Store(connection), Log("things", shards=2))
    publisher = Publisher(Store(connection), redis_client, epoch=Epoch(1))
    publisher.refresh()
    for _ in range(3):
        connection.execute(STAGE, [1])
        publisher.tails.advance_target(tick(Store(connection)).tails)
    assert publisher.publish().added == 3
    connection.execute("DELETE FROM penstock.journal WHERE first_offset > 3 - %s", [deleted])
    connection.execute(STAGE, [1])
    ticked = tick(Store(connection))
    if hears_tick:
        publisher.tails.advance_target(ticked.tails, ticked.firsts)
        assert (SHARD in publisher.unusable) == is_damaged, "before anything is sent"
    else:
        if deleted == 3:  # one that has heard nothing yet
            publisher = Publisher(Store(connection), redis_client, epoch=Epoch(1))
        publisher.refresh()

    assert publisher.publish(ticked.inline_records).added == (0 if is_damaged else 1)
    assert [*map(type, publisher.unusable.errors.values())] == [DamagedJournal] * is_damaged
    if is_damaged:
        assert publisher.tails.backlog == 0
        assert (publisher.tails.lacking, publisher.tails.targets("log")) == ([], {})


def test_a_slice_that_fails_leaves_the_target_as_it_was(connection: Connection, redis_client: redis.Redis) -> None:
    """The next one goes on, and takes the other shards first or last: none waits for ever."""
    register_channel(Store(connection), Log("things", shards=2))
    connection.execute(STAGE, [5])
    connection.execute(STAGE.replace("'things', 0", "'things', 1"), [5])
    tick(Store(connection))
    publisher = SlicePublisher(Store(connection), redis_client, epoch=Epoch(1), max_records=4)
    publisher.refresh()
    redis_client.config_set("maxmemory", "1")
    try:
        with pytest.raises(AppendRefused):
            publisher.publish()
    finally:
        redis_client.config_set("maxmemory", "0")

    assert publisher.tails.journal == {SHARD: 5, OTHER: 5}
    assert [publisher.publish().added for _ in range(4)] == [4, 4, 2, 0]


@given(
    target=st.dictionaries(st.sampled_from([ShardName("a", Shard(n)) for n in range(4)]), st.integers(1, 9)),
    tails=st.dictionaries(st.sampled_from([ShardName("a", Shard(n)) for n in range(4)]), st.integers(0, 9)),
    most=st.integers(1, 12),
)
def test_a_slice_takes_so_many_records_beyond_the_logs_ends(
    target: dict[ShardName, Offset], tails: dict[ShardName, Offset], most: int
) -> None:
    chosen = nearest(target, tails, most)

    assert chosen.keys() == target.keys()
    assert all(min(tails.get(s, 0), target[s]) <= chosen[s] <= target[s] for s in target)
    assert count_missing(chosen, tails) == min(most, count_missing(target, tails))
