"""Groups when readers die, the log loses its end or is another one, and Redis is emptied: nothing is silent, nothing is stuck."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
import redis

from channels.groups.conftest import CURSOR, GroupedLog, Reader, offsets, waiting
from penstock.clients import LogWriter
from penstock.errors import DamagedEntry, ForeignLog, GroupLost, LogDiverged
from penstock.structures import turns
from penstock.testing import eventually

WAIT = """
import sys
from penstock.clients import LogGroup
LogGroup.connect(sys.argv[1], "work", "mailers").read(10, block_s=60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_a_reader_that_dies_while_it_waits_neither_stalls_the_others_nor_takes_records(
    packed: GroupedLog, reader: Reader, redis_client: redis.Redis, redis_url: str, how: int
) -> None:
    """Killed, or stopped, which closes no connection.  It was the first in the line, which watches the log."""
    with subprocess.Popen([sys.executable, "-c", WAIT, redis_url]) as process:
        try:
            eventually(lambda: waiting(redis_client) == 1, "the process waits", timeout_s=90)
            with ThreadPoolExecutor(2) as pool:
                futures = [pool.submit(reader().read, 10, block_s=60) for _ in range(2)]
                eventually(lambda: waiting(redis_client) == 3, "all three wait")
                os.kill(process.pid, how)
                packed.append(6)
                began = monotonic()
                first = [each.result(60) for each in futures]
                assert monotonic() - began < 30
                # The dead one has a share until it is missed, which is no record of its own.
                rest = [reader().read(10) for _ in range(5)]
            assert sorted(o for each in (*first, *rest) for o in offsets(each)) == [*range(1, 7)]
            assert min(map(len, first)) >= 1
        finally:
            process.kill()


def test_a_reader_that_has_given_up_waiting_leaves_the_line(
    packed: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    assert len(reader().read(block_s=0.05)) == 0

    assert waiting(redis_client) == 0
    assert not redis_client.keys("*wake*")


def pretend_to_wait(client: redis.Redis, ms: int) -> None:
    """Puts another reader into the line, which was heard of ``ms`` before it is out."""
    client.zadd(f"{CURSOR}:places", {"another": 1})
    seconds, micros = client.time()
    client.zadd(f"{CURSOR}:heard", {"another": seconds * 1000 + micros // 1000 + ms})


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("share", [3, 1])
def test_a_reader_that_does_not_wait_takes_its_share_of_what_is_there(
    packed: GroupedLog, reader: Reader, redis_client: redis.Redis, share: int
) -> None:
    packed.append(2 * share)
    group = reader()
    pretend_to_wait(redis_client, 500_000)

    assert offsets(group.read()) == [*range(1, share + 1)]


def test_a_reader_that_comes_lets_those_who_wait_go_first(
    packed: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """For a moment: the other one may be dead."""
    packed.append(6)
    group = reader()
    pretend_to_wait(redis_client, 1400)
    began = monotonic()
    taken = group.read(block_s=60)

    assert 0.1 <= monotonic() - began < 30
    assert offsets(taken)[:3] == [1, 2, 3]


def test_a_log_that_has_lost_its_end_is_refused_until_it_is_whole_again(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """As of a streamer that replays it: the cursor stays right."""
    work.append(6)
    group = reader()
    group.read(5)
    redis_client.delete(work.stream())

    with pytest.raises(LogDiverged, match="read up to 5, and the log ends at 0"):
        group.read()
    work.append(3, first=1)
    with pytest.raises(LogDiverged, match="the log ends at 3"):
        group.read(block_s=60)
    work.append(4, first=4)
    assert offsets(group.read()) == [6, 7]


def test_a_log_that_has_lost_its_end_for_good_goes_on_after_a_rewind(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(6)
    group = reader(retry_s=60)
    group.read(5)
    redis_client.delete(work.stream())
    work.append(1, first=1)

    assert group.rewind(0, "last") == 2
    work.append(1)
    assert offsets(group.read()) == [2]
    state, *_ = group.states().values()
    assert state.pending == 2, "those before the rewind are kept"


def test_pending_records_beyond_the_end_of_the_log_are_not_taken_for_evicted(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(3)
    group = reader(retry_s=0.02, evicted="skip")
    group.read()
    redis_client.delete(work.stream())
    eventually(lambda: next(iter(group.states().values())).due == 3, "they are due")

    with pytest.raises(LogDiverged):
        group.read()
    work.append(3, first=1)
    assert offsets(group.read(block_s=5)) == [1, 2, 3]


def test_a_log_with_other_records_at_the_same_offsets_is_refused(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(3)
    group = reader()
    group.read()
    redis_client.delete(work.stream())
    work.append(3, first=1, staged=99)
    work.append(2)

    with pytest.raises(LogDiverged, match="another record at 3"):
        group.read()
    group.rewind(0, "first")
    assert offsets(group.read()) == [1, 2, 3, 4, 5]


def test_a_log_that_was_deleted_and_written_anew_is_refused(
    redis_client: redis.Redis, redis_url: str, reader: Reader
) -> None:
    """Its entries may begin and end elsewhere, so that no entry tells."""
    group = reader()
    with LogWriter.connect(redis_url, "work") as writer:
        writer.append([1, 2, 3])
        assert offsets(group.read(2)) == [1, 2]
        writer.append([4])
        assert offsets(group.read()) == [3, 4]
        redis_client.delete("penstock:{work/0}:log", "penstock:{work/0}:epoch")
    with LogWriter.connect(redis_url, "work") as writer:
        writer.append([*range(9)])

    with pytest.raises(LogDiverged, match="another log"):
        group.read()
    group.rewind(0, "first")
    assert len(group.read()) == 9


@pytest.mark.parametrize("kept", [3, 4])
def test_an_epoch_that_began_with_other_records_moves_the_cursor_back_once_and_loudly(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis, kept: int
) -> None:
    """Whatever the log holds by then: the records from there on, be it one, are other ones, which the group has not had."""
    work.append(6)
    group, other = reader(retry_s=60), reader(retry_s=60)
    group.read(5)
    redis_client.delete(work.stream())
    redis_client.hset("penstock:{work/0}:epoch-ends", mapping={"2": kept, "3": 6})
    work.append(8, first=1, staged=99, epoch=3)

    with pytest.raises(LogDiverged, match=f"of the log has other records from {kept + 1} on"):
        group.read()
    assert next(iter(group.states().values())).pending == kept, "the lost ones are forgotten"
    assert offsets(other.read()) == [*range(kept + 1, 9)]
    state, *_ = group.states().values()
    assert (state.rewound, state.pending) == (1, 8)


def test_a_new_epoch_of_the_same_records_moves_nothing(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(3)
    group = reader()
    group.read(2)
    redis_client.hset("penstock:{work/0}:epoch-ends", "1", "0")
    work.append(1, epoch=2)

    assert offsets(group.read()) == [3, 4]


def test_an_epoch_whose_other_records_were_not_read_moves_nothing(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """Though the group has read a part of the entry that they are in."""
    work.append(6)
    group = reader()
    group.read(4)
    redis_client.delete(work.stream())
    redis_client.hset("penstock:{work/0}:epoch-ends", "2", "4")
    work.append(4, first=1, epoch=2)
    work.append(2, staged=99, epoch=2)

    assert offsets(group.read()) == [5, 6]
    assert next(iter(group.states().values())).rewound == 0


def test_a_reader_heard_of_before_the_clock_was_set_back_is_out_of_the_line(
    packed: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """Otherwise it would be the first in it, and have its share, for as long."""
    packed.append(2)
    redis_client.zadd(f"{CURSOR}:places", {"gone": 1})
    redis_client.zadd(f"{CURSOR}:heard", {"gone": 10**15})

    assert offsets(reader().read()) == [1, 2]
    assert redis_client.exists(f"{CURSOR}:places", f"{CURSOR}:heard") == 0


def test_a_reader_whose_turn_it_is_not_takes_what_nobody_else_does(
    packed: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """The first in the line has died, and counts as waiting for longer than the second one waits."""
    packed.append(2)
    redis_client.zadd(f"{CURSOR}:places", {"dead": 1})
    redis_client.eval("redis.call('ZADD', KEYS[1], redis.call('TIME')[1] * 1000 + 60000, 'dead')", 1, f"{CURSOR}:heard")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "VALID_MS", 600_000)
        assert offsets(reader().read(1, block_s=30)) == [1]


def test_a_group_that_vanishes_is_not_begun_again_in_silence(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """A reader that has read it knows that it existed; a new one begins it as its option says."""
    work.append(3)
    group = reader(start="last")
    group.rewind(0, "first")
    group.read(1)
    redis_client.flushall()
    work.append(3, first=1)

    with pytest.raises(GroupLost, match="no such group"):
        group.read()
    with pytest.raises(GroupLost):
        group.read(block_s=5)
    assert offsets(reader(start="first").read(1)) == [1]
    assert offsets(group.read(1)) == [2]


def test_keys_that_hold_something_else_are_refused_and_not_changed(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(3)
    redis_client.set(CURSOR, "soon")
    with pytest.raises(ForeignLog, match="cursor holds no offset"):
        reader().read()
    redis_client.delete(CURSOR)
    redis_client.lpush(CURSOR, "a")
    with pytest.raises(ForeignLog, match="another type"):
        reader().read()
    redis_client.delete(CURSOR)
    redis_client.xadd(work.stream(), {"a": "b"}, "4-0")
    group = reader()

    assert offsets(group.read()) == [1, 2, 3]
    with pytest.raises(ForeignLog, match="entry 4-0"):
        group.read()
    assert redis_client.get(CURSOR) == b"4"


def test_states_of_a_log_that_begins_with_something_else_are_refused(
    work: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    work.append(2)
    work.append(2)
    entries: Any = redis_client.xrange(work.stream())
    (first_id, _), *others = entries
    redis_client.delete(work.stream())
    redis_client.xadd(work.stream(), {"a": "b"}, first_id)
    for entry_id, fields in others:
        redis_client.xadd(work.stream(), fields, entry_id)

    with pytest.raises(ForeignLog, match="the first entry"):
        reader().states()


def test_a_damaged_entry_costs_no_record_of_another_one(
    packed: GroupedLog, reader: Reader, redis_client: redis.Redis
) -> None:
    """It was taken, and its error names its offsets; with acknowledgements it is pending."""
    packed.append(2)
    packed.append(2)
    packed.append(2)
    entries: Any = redis_client.xrange(packed.stream())
    redis_client.delete(packed.stream())
    for number, (entry_id, fields) in enumerate(entries):
        damaged = {**fields, b"data": b"1\n2\n3"} if number == 1 else fields
        redis_client.xadd(packed.stream(), damaged, entry_id)
    group = reader(retry_s=60)

    assert offsets(group.read()) == [1, 2, 5, 6]
    with pytest.raises(DamagedEntry, match="offsets 3-4"):
        group.read()
    assert next(iter(group.states().values())).pending == 6


def test_a_group_is_deleted_whole(work: GroupedLog, reader: Reader, redis_client: redis.Redis) -> None:
    work.append(3)
    group = reader(retry_s=60)
    group.read(2)
    group.delete()

    assert not redis_client.keys("*group*")
    assert redis_client.exists(work.stream())
