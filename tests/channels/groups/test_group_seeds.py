"""RCP 11, the proposal that logs come from: what version 1.0 asks of groups, and all that version 1.1 asks."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations_with_replacement
from random import Random
from time import monotonic
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from channels.groups.conftest import CURSOR, GroupedLog, Reader, offsets, waiting
from fixtures.constants import SetConstants
from penstock.clients import LogGroup
from penstock.errors import Gap, GroupLost
from penstock.testing import eventually


def test_the_next_reader_gets_the_records_that_follow(work: GroupedLog, reader: Reader) -> None:
    """The cursor moves with the read."""
    work.append(6)
    one, other = reader(), reader()

    assert offsets(one.read(2)) == [1, 2]
    assert offsets(other.read(3)) == [3, 4, 5]
    assert offsets(one.read(10)) == [6]
    assert len(other.read(10)) == 0
    assert one.read(1, block_s=0.05).records == []


def test_the_cursor_is_a_plain_key_and_set_moves_it(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(6)
    group = reader()
    group.read(5)

    assert redis_client.get(CURSOR) == b"6"
    redis_client.set(CURSOR, 3)
    assert offsets(group.read(2)) == [3, 4]
    redis_client.set(CURSOR, 0)
    assert offsets(group.read(2)) == [1, 2]


def test_a_group_is_rewound_to_an_offset_and_to_both_ends(work: GroupedLog, reader: Reader) -> None:
    work.append(6)
    group = reader()
    group.read(6)

    assert group.rewind(0, 2) == 2
    assert offsets(group.read(1)) == [2]
    assert group.rewind(0, "first") == 1
    assert offsets(group.read(1)) == [1]
    assert group.rewind(0, "last") == 7
    assert len(group.read(1)) == 0


def test_a_future_offset_skips_what_comes_before_it(work: GroupedLog, reader: Reader) -> None:
    """As of a read that blocks: the records before it are skipped, and it is no error that the log ends before it."""
    work.append(2)
    group = reader()
    group.rewind(0, 5)

    assert group.read(1, block_s=0.02).records == []
    work.append(4)
    assert offsets(group.read(9)) == [5, 6]


@pytest.mark.parametrize(("start", "expected"), [("first", [1, 2, 3]), ("last", [3])])
def test_a_new_group_begins_at_the_first_record_or_after_the_last_one(
    work: GroupedLog, reader: Reader, start: str, expected: list[int]
) -> None:
    work.append(2)
    group = reader(start=start)
    first = offsets(group.read(2))
    work.append(1)

    assert first + offsets(group.read(9)) == expected


@pytest.mark.parametrize("start", ["first", "last"])
def test_a_group_may_begin_before_the_log_does(work: GroupedLog, reader: Reader, start: str) -> None:
    """A log that is replayed may begin at any offset: what comes before was never the group's."""
    group = reader(start=start)

    assert group.read(1, block_s=0.02).records == []
    work.append(2, first=5003, begins=True)
    assert offsets(group.read(9)) == [5003, 5004]


def test_what_was_evicted_since_a_group_began_at_an_empty_log_is_told(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    group = reader()
    assert group.read(1, block_s=0.02).records == []
    for _ in range(3):
        work.append(2)
    redis_client.xtrim(work.stream(), minid="5-0", approximate=False)

    with pytest.raises(Gap, match="1-4 were evicted"):
        group.read()
    taken = reader(evicted="skip").read()
    assert offsets(taken) == [5, 6]
    assert [(each.first, each.last) for each in taken.missed] == [(1, 4)]


def test_a_deleted_newest_record_was_given_all_the_same(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """As ``LogReader.info`` says, and as the next record's offset shows."""
    for _ in range(3):
        work.append(1)
    late, early = reader("late", start="last"), reader("early")
    assert len(early.read()) == 3
    redis_client.xdel(work.stream(), "3-0")

    assert late.rewind(0, "last") == 4
    assert early.read().records == []
    assert reader("new", start="last").read().records == []
    assert next(iter(early.states().values())).tail == 3


def test_nothing_new_is_read_before_all_that_is_due_again(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """Although as many as are asked for have expired, which are dropped."""
    work.append(8)
    group = reader(retry_s=3600, expire_s=7200)
    assert offsets(group.read(6)) == [1, 2, 3, 4, 5, 6]
    for offset in range(1, 7):
        redis_client.zadd(f"{CURSOR}:due", {f"{offset:016}": offset})
        if offset <= 4:
            redis_client.hset(f"{CURSOR}:pending", f"{offset:016}", "1 1")

    taken = group.read(2)
    assert offsets(taken) == [5, 6]
    assert [(each.first, each.last) for each in taken.dropped] == [(1, 4)]
    assert offsets(group.read(2)) == [7, 8]


def test_a_group_that_has_to_exist_is_not_begun(work: GroupedLog, reader: Reader) -> None:
    work.append(1)
    with pytest.raises(GroupLost, match="rewind"):
        reader(start=None).read()
    for name in reader().states():
        reader().rewind(name.shard, "first")

    assert offsets(reader(start=None).read()) == [1]


def test_a_group_delivers_no_nulls_and_says_what_was_evicted(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """The proposal leaves it open.  A worker has no use for a NULL: the read is refused, or goes on and names the offsets."""
    for _ in range(3):
        work.append(2)
    group = reader()
    group.read(1)
    redis_client.xtrim(work.stream(), minid="5-0", approximate=False)

    with pytest.raises(Gap, match="2-4 were evicted"):
        group.read()
    assert redis_client.get(CURSOR) == b"2"
    skipping = reader(evicted="skip")
    taken = skipping.read()
    assert offsets(taken) == [5, 6]
    assert [(each.first, each.last) for each in taken.missed] == [(2, 4)]
    state, *_ = group.states().values()
    assert (state.missed, state.delivered) == (3, 3)


def test_what_is_left_of_a_log_evicted_to_its_end_is_nothing(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(3)
    group = reader(evicted="skip")
    group.read(1)
    redis_client.xtrim(work.stream(), maxlen=0, approximate=False)

    assert [(each.first, each.last) for each in group.read().missed] == [(2, 3)]
    work.append(1)
    assert offsets(group.read()) == [4]


def read_waiting(readers: Sequence[LogGroup], client: redis.Redis, count: int) -> list[Any]:
    """Lets the readers wait, one after the other; returns their futures."""
    pool = ThreadPoolExecutor(len(readers))
    futures = []
    for each in readers:
        before = waiting(client)
        futures.append(pool.submit(each.read, count, block_s=60))
        eventually(partial(is_waiting, client, before + 1), "the reader waits")
    pool.shutdown(wait=False)
    return futures


def is_waiting(client: redis.Redis, readers: int) -> bool:
    return waiting(client) == readers


@pytest.mark.usefixtures("in_turn")
def test_a_burst_is_divided_among_the_readers_that_wait(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """With the groups of Redis, the first reader that waits gets all seven."""
    readers = [reader() for _ in range(3)]
    futures = read_waiting(readers, redis_client, 10)
    work.append(7)

    assert [offsets(each.result(60)) for each in futures] == [[1, 2, 3], [4, 5], [6, 7]]


@pytest.mark.usefixtures("in_turn")
def test_readers_that_wait_are_served_in_turn(work: GroupedLog, reader: Reader, redis_client: redis.Redis) -> None:
    """Who was served first goes to the end of the line."""
    readers = [reader() for _ in range(3)]
    pending = dict(zip("abc", read_waiting(readers, redis_client, 10), strict=True))
    served = ""
    for _ in range(9):
        work.append(1)
        eventually(lambda: any(each.done() for each in pending.values()), "one is served")
        [name] = [name for name, each in pending.items() if each.done()]
        served += name
        [pending[name]] = read_waiting([readers["abc".index(name)]], redis_client, 10)
    work.append(30)
    for each in pending.values():
        each.result(60)

    assert served == "abcabcabc"


def test_no_shard_is_always_the_last(packed: GroupedLog, reader: Reader) -> None:
    group = reader(shards=3)
    for shard in range(3):
        packed.append(9, shard=shard)

    assert {group.read(1)[0].shard for _ in range(3)} == {0, 1, 2}


def make_due(client: redis.Redis) -> None:
    """What is pending is due again: as if so much time had gone by."""
    pending: Any = client.zrange(f"{CURSOR}:due", 0, -1)
    client.zadd(f"{CURSOR}:due", dict.fromkeys(pending, 1))


def test_an_unacknowledged_record_is_delivered_again(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(3)
    one, other = reader(retry_s=60), reader(retry_s=60)
    first = one.read()
    assert len(other.read()) == 0
    assert one.acknowledge([first[1]]) == 1

    make_due(redis_client)
    again = other.read(block_s=60)
    assert offsets(again) == [1, 3]
    assert first.deliveries == (1, 1, 1)
    assert again.deliveries == (2, 2)
    assert len(one.read()) == 0, "the time of the next delivery is counted from this one"
    make_due(redis_client)
    third = one.read(block_s=60)
    assert (offsets(third), third.deliveries) == ([1, 3], (3, 3))


def test_what_is_due_again_comes_in_the_order_of_offsets(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(3)
    group = reader(retry_s=60)
    group.read()
    due = {f"{offset:016}": at for offset, at in ((1, 3), (2, 1), (3, 2))}
    assert redis_client.zadd(f"{CURSOR}:due", due, ch=True) == 3

    assert offsets(group.read()) == [1, 2, 3]


def test_offsets_and_ranges_are_acknowledged_and_unknown_ones_ignored(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(9)
    group = reader(retry_s=60)
    group.read(8)

    assert group.acknowledge_offsets(0, 2, (4, 6), 77, (500, 10**15)) == 4
    assert group.acknowledge_offsets(0, 2, (6, 7)) == 1
    assert group.acknowledge_offsets(0, (1, 10**15)) == 3
    for first, last in combinations_with_replacement(range(1, 10), 2):  # shorter and longer than what is pending
        group.rewind(0, 1)
        group.read(8)
        group.acknowledge_offsets(0, 2, (4, 6))
        acknowledged = len({1, 3, 7, 8}.intersection(range(first, last + 1)))
        assert group.acknowledge_offsets(0, (first, last)) == acknowledged
        state, *_ = group.states().values()
        assert (state.pending, state.next_offset) == (4 - acknowledged, 9)
        assert redis_client.hlen(f"{CURSOR}:pending") == state.pending


def test_any_records_of_any_shards_are_acknowledged_in_any_order_and_each_once(
    packed: GroupedLog, reader: Reader
) -> None:
    for shard in (0, 1):
        packed.append(3, shard=shard)
    group = reader(shards=2, retry_s=60)
    for number in range(64):
        for shard in (0, 1):
            group.rewind(shard, 1)
        chosen = [each for at, each in enumerate(group.read()) if number >> at & 1]
        left = {shard: 3 - sum(each.shard == shard for each in chosen) for shard in (0, 1)}

        assert group.acknowledge(Random(number).sample(chosen * 2, len(chosen) * 2)) == len(chosen)
        assert {name.shard: state.pending for name, state in group.states().items()} == left


def test_an_expired_record_is_dropped_counted_and_told(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(2)
    group = reader(retry_s=60, expire_s=120)
    group.read()
    make_due(redis_client)
    again = len(group.read())
    pending: Any = redis_client.hgetall(f"{CURSOR}:pending")
    redis_client.hset(f"{CURSOR}:pending", mapping=dict.fromkeys(pending, b"1 2"))  # it has expired
    make_due(redis_client)
    with capture_logs() as logs:
        taken = group.read(block_s=60)

    assert len(taken) == 0
    assert [(each.first, each.last) for each in taken.dropped] == [(1, 2)]
    assert [(each["event"], each["reason"], each["first"], each["last"]) for each in logs] == [
        ("records skipped", "dropped", 1, 2)
    ]
    state, *_ = group.states().values()
    assert (state.dropped, state.pending, state.redelivered) == (2, 0, again)
    assert again == 2


def test_a_read_that_drops_much_ends_after_a_thousand_records(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """Redis serves nobody else meanwhile.  What is new comes after all that was due."""
    work.append(1200)
    group = reader(retry_s=60, expire_s=60, max_pending=2000)
    while group.read(1000):
        pass
    pending: Any = redis_client.hgetall(f"{CURSOR}:pending")
    redis_client.hset(f"{CURSOR}:pending", mapping=dict.fromkeys(pending, b"1 1"))  # it has expired
    make_due(redis_client)
    work.append(1)

    for dropped, new in (((1, 1001), []), ((1002, 1200), [1201])):
        taken = group.read(1)
        assert [(skipped.first, skipped.last) for skipped in taken.dropped] == [dropped]
        assert offsets(taken) == new


def test_no_new_records_come_while_as_many_are_pending_as_may_be(work: GroupedLog, reader: Reader) -> None:
    """Although there are some; until one is acknowledged, or delivered again.  Those who acknowledge nothing have no limit."""
    work.append(5)
    group, other = (reader(retry_s=60, max_pending=2) for _ in range(2))
    first = group.read()
    assert offsets(first) == [1, 2]
    assert len(other.read(block_s=0.02)) == 0

    group.acknowledge(first[:1])
    assert offsets(other.read()) == [3]
    assert len(group.read(block_s=0.02)) == 0
    assert offsets(reader(max_pending=2).read()) == [4, 5]
    state, *_ = group.states().values()
    assert (state.pending, state.tail) == (2, 5)


def test_what_is_dropped_makes_room_at_the_limit(work: GroupedLog, reader: Reader, redis_client: redis.Redis) -> None:
    work.append(5)
    group = reader(retry_s=60, expire_s=60, max_pending=2)
    for member in (f"{record.offset:016}" for record in group.read()):
        redis_client.zadd(f"{CURSOR}:due", {member: 1})
        redis_client.hset(f"{CURSOR}:pending", member, "1 1")  # it has expired

    taken = group.read()
    assert [(each.first, each.last) for each in taken.dropped] == [(1, 2)]
    assert offsets(taken) == [3, 4]


def test_at_the_limit_records_are_delivered_again_as_soon_as_they_are_due(
    work: GroupedLog, reader: Reader, set_constants: SetConstants
) -> None:
    set_constants("structures.turns", HEARTBEAT_S=600.0, FULL_S=600.0)
    work.append(5)
    group = reader(retry_s=0.1, max_pending=2)
    group.read()

    began = monotonic()
    assert offsets(group.read(block_s=60)) == [1, 2]
    assert monotonic() - began < 30


def test_a_reader_that_waits_at_the_limit_goes_on_after_an_acknowledgement(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    set_constants("structures.turns", HEARTBEAT_S=600.0)
    work.append(3)
    group = reader(retry_s=60, max_pending=2)
    taken = group.read()
    [waiting_read] = read_waiting([reader(retry_s=60, max_pending=2)], redis_client, 10)
    group.acknowledge(taken)

    assert offsets(waiting_read.result(60)) == [3]


def test_the_scan_stops_at_the_first_record_that_is_not_due(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(4)
    reader(retry_s=60).read(2)
    reader(retry_s=0.05).read(1)
    group = reader(retry_s=0.05)

    eventually(lambda: group.states() and next(iter(group.states().values())).due == 1, "it is due")
    assert offsets(group.read(9)) == [3, 4]


def test_a_record_evicted_while_pending_is_refused_or_reported(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """The proposal does not say.  It cannot be delivered again, so it is as if it were evicted before."""
    work.append(2)
    work.append(2)
    group = reader(retry_s=0.05)
    group.read(4)
    redis_client.xtrim(work.stream(), minid="3-0", approximate=False)

    with pytest.raises(Gap, match="1-1 were evicted"):
        group.read(block_s=60)
    taken = reader(retry_s=0.05, evicted="skip").read(block_s=60)
    assert [(each.first, each.last) for each in taken.missed] == [(1, 2)]
    assert offsets(taken) == [3, 4]
    state, *_ = group.states().values()
    assert (state.missed, state.pending) == (2, 2)
