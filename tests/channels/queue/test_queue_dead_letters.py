"""Dead letters of a queue: browsed in pages, and brought back."""

import pytest

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


def test_a_message_that_is_brought_back_has_its_unique_name_again(queue: FairQueue) -> None:
    first = queue.write("t", "first", unique=Unique("invoice-17"))
    with queue.reader() as reader:
        reader.read()[0].dead("bad")
    assert queue.redrive(queue.dead_letters()) == 1

    assert queue.write("t", "again", unique=Unique("invoice-17")).duplicate_of == first.id


def test_a_name_that_another_has_taken_meanwhile_stays_its_own(queue: FairQueue) -> None:
    queue.write("t", "first", unique=Unique("invoice-17"))
    with queue.reader() as reader:
        reader.read()[0].dead("bad")
    second = queue.write("t", "second", unique=Unique("invoice-17"))
    assert queue.redrive(queue.dead_letters()) == 1

    assert queue.write("t", "third", unique=Unique("invoice-17")).duplicate_of == second.id
