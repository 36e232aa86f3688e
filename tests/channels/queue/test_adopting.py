"""A plain stream is moved into a queue, while its old writers and readers still run."""

import pytest

from fixtures.clients import RedisClient
from penstock.clients import FairQueue, PlainStream
from penstock.errors import InvalidMessage

pytestmark = pytest.mark.queue(name="receipts", streams=4)

OLD, GROUP = "old-jobs", "workers"


def plain(*, idle_s: float = 60.0) -> PlainStream:
    return PlainStream(
        OLD,
        GROUP,
        tenant=lambda fields: fields[b"account"].decode(),
        payload=lambda fields: fields[b"body"],
        idle_s=idle_s,
    )


def fill(client: RedisClient, count: int) -> None:
    for number in range(count):
        client.xadd(OLD, {"account": f"a{number % 3}", "body": str(number)})


def drain(queue: FairQueue, stream: PlainStream) -> int:
    moved = 0
    while some := queue.adopt(stream):
        moved += some
    return moved


def payloads(queue: FairQueue) -> set[bytes]:
    with queue.reader() as reader:
        found: set[bytes] = set()
        while leases := reader.read(100):
            found |= {lease.message.payload for lease in leases}
            reader.done(leases)
        return found


def test_every_entry_that_was_not_done_moves(redis_client: RedisClient, queue: FairQueue) -> None:
    fill(redis_client, 250)
    redis_client.xgroup_create(OLD, GROUP, id="0")
    [[_, [(done, _)]]] = redis_client.xreadgroup(GROUP, "old", {OLD: ">"}, count=1)
    redis_client.xack(OLD, GROUP, done)

    assert drain(queue, plain()) == 249
    assert queue.adopt(plain()) is None
    assert payloads(queue) == {str(number).encode() for number in range(1, 250)}


def test_a_stream_that_nobody_has_read_moves_whole(redis_client: RedisClient, queue: FairQueue) -> None:
    fill(redis_client, 3)

    assert queue.adopt(plain()) == 0  # the group is made
    assert queue.adopt(plain()) == 3
    assert queue.adopt(plain()) is None


def test_what_an_old_reader_works_on_stays_its_own(redis_client: RedisClient, queue: FairQueue) -> None:
    fill(redis_client, 2)
    redis_client.xgroup_create(OLD, GROUP, id="0")
    [[_, [(first, _)]]] = redis_client.xreadgroup(GROUP, "old", {OLD: ">"}, count=1)

    assert queue.adopt(plain()) == 1
    assert queue.adopt(plain()) == 0
    redis_client.xack(OLD, GROUP, first)
    assert queue.adopt(plain()) is None


def test_what_a_dead_reader_held_is_taken_over(redis_client: RedisClient, queue: FairQueue) -> None:
    fill(redis_client, 2)
    redis_client.xgroup_create(OLD, GROUP, id="0")
    redis_client.xreadgroup(GROUP, "dead", {OLD: ">"}, count=2)

    assert queue.adopt(plain(idle_s=0)) == 0  # claimed
    assert queue.adopt(plain(idle_s=0)) == 2
    assert payloads(queue) == {b"0", b"1"}


def test_an_entry_that_is_moved_again_after_a_crash_is_one_message(
    redis_client: RedisClient, queue: FairQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(redis_client, 5)
    redis_client.xgroup_create(OLD, GROUP, id="0")

    def crash(*_: object) -> int:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(redis_client, "xack", crash)
        with pytest.raises(ZeroDivisionError):
            queue.adopt(plain())

    assert len(queue) == 5
    assert queue.adopt(plain()) == 5
    assert len(queue) == 5


def test_an_entry_that_cannot_be_a_message_stays_and_stops_no_other(
    redis_client: RedisClient, queue: FairQueue
) -> None:
    fill(redis_client, 1)
    bad = redis_client.xadd(OLD, {"account": "", "body": "x"})
    fill(redis_client, 1)
    redis_client.xgroup_create(OLD, GROUP, id="0")

    with pytest.raises(InvalidMessage, match="tenant is empty"):
        queue.adopt(plain())

    assert len(queue) == 2
    assert [id_ for id_, _ in redis_client.xrange(OLD)] == [bad]


def test_a_reader_reads_both_until_the_old_one_is_empty(redis_client: RedisClient, queue: FairQueue) -> None:
    fill(redis_client, 120)
    redis_client.xgroup_create(OLD, GROUP, id="0")
    queue.write("new", "new")

    with queue.reader(adopts=plain()) as reader:
        found = [lease.message.payload for _ in range(3) for lease in reader.read(100)]

    assert len(found) == 121
    assert redis_client.xlen(OLD) == 0
