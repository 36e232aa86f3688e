"""Dead letters of a queue: browsed in pages, and brought back."""

import pytest

from fixtures.queues import Probe
from penstock.channels.queue import NewMessage
from penstock.clients import FairQueue
from penstock.declaring.unique import TenantLimits, Unique
from penstock.errors import TenantFull


def bury(queue: FairQueue, count: int) -> None:
    queue.write_many([NewMessage("t", str(number)) for number in range(count)])
    with queue.reader() as reader:
        while leases := reader.read(100):
            for lease in leases:
                lease.dead("bad")


@pytest.mark.parametrize("count", [1, 100, 150, 250, 1000])
def test_more_than_a_script_returns_are_listed_once_each(queue: FairQueue, count: int) -> None:
    bury(queue, 250)

    listed = [int(each.message.payload) for each in queue.dead_letters(count)]

    assert len(listed) == min(count, 250)
    assert len(set(listed)) == len(listed)


def test_all_that_are_listed_can_be_brought_back(queue: FairQueue) -> None:
    bury(queue, 130)

    assert queue.redrive(queue.dead_letters(1000)) == 130
    assert (queue.stats().waiting, queue.stats().dead) == (130, 0)


def test_the_bytes_of_a_message_that_is_brought_back_are_its_tenants_again(queue: FairQueue) -> None:
    queue.limit("t", TenantLimits(bytes=10))
    queue.write("t", "12345678")
    with queue.reader() as reader:
        reader.read()[0].dead("bad")
    queue.write("t", "12345678")
    assert queue.redrive(queue.dead_letters()) == 1

    with queue.reader() as reader:
        reader.read()[0].done()
        with pytest.raises(TenantFull):
            queue.write("t", "123")
        reader.read()[0].done()
    assert queue.write("t", "1234567890").is_new


@pytest.mark.parametrize("end", ["done", "dead", "deleted"])
@pytest.mark.parametrize(
    "unique", [Unique("n", until="queued"), Unique("n"), Unique("n", window=60)], ids=lambda unique: unique.held_until
)
def test_a_message_that_is_brought_back_has_its_unique_name_again_until_it_ends(
    unique: Unique, end: str, probe: Probe
) -> None:
    """One for a time, too, of which the time was over."""
    probe.write("t", "first", unique=unique)
    [given] = probe.take()
    probe.settle(given, "dead")
    probe.pass_time(61)
    probe.run(probe.shard.redrive([given.id]))
    assert probe.write("t", "again", unique=unique)[0].duplicate_of == given.id

    [given] = probe.take()
    if end == "deleted":
        probe.run(probe.shard.delete([given.id]))
    else:
        probe.settle(given, end)
    assert probe.write("t", "next", unique=unique)[0].is_new


def test_a_name_that_another_has_taken_meanwhile_stays_its_own(queue: FairQueue) -> None:
    queue.write("t", "first", unique=Unique("invoice-17"))
    with queue.reader() as reader:
        reader.read()[0].dead("bad")
    second = queue.write("t", "second", unique=Unique("invoice-17"))
    assert queue.redrive(queue.dead_letters()) == 1

    assert queue.write("t", "third", unique=Unique("invoice-17")).duplicate_of == second.id
