"""The leash: tasks end with their driver, and at its word."""

from penstock.spark.engine.control_channel import Holder, Leash, Line
from penstock.testing import eventually


def test_a_task_is_taut_until_the_driver_cuts() -> None:
    holder = Holder("127.0.0.1", lambda _: None)
    with Leash(holder.address, "first") as leash:
        eventually(lambda: holder.held == 1, "the task is held")
        assert leash.taut()

        holder.cut()

        eventually(lambda: not leash.taut(), "the task hears of it")


def test_a_task_that_comes_after_the_cut_does_not_begin() -> None:
    holder = Holder("127.0.0.1", lambda _: None)
    holder.cut()
    with Leash(holder.address, "first") as leash:
        eventually(lambda: not leash.taut(), "it is cut at once")


def test_the_driver_hears_last_words_after_the_cut() -> None:
    heard: list[Line] = []
    holder = Holder("127.0.0.1", heard.append)
    with Leash(holder.address, "first") as leash:
        eventually(lambda: holder.held == 1, "the task is held")
        holder.cut()
        leash.tell({"task": "streamer", "added": 3})

    eventually(lambda: heard == [{"task": "streamer", "added": 3}], "its counts arrive")


def test_a_stranger_is_not_heard() -> None:
    heard: list[Line] = []
    holder = Holder("127.0.0.1", heard.append)
    address = holder.address.rpartition(":")[0] + ":wrong"
    with Leash(address, "first") as leash:
        leash.tell({"error": "Refused"})
        eventually(lambda: not leash.taut(), "it is shown the door")
    holder.cut()

    assert heard == []


def test_an_epoch_that_is_over_for_one_task_is_over_for_all_and_for_those_that_come_again() -> None:
    holder = Holder("127.0.0.1", lambda _: None)
    with (
        Leash(holder.address, "first") as one,
        Leash(holder.address, "first") as two,
        Leash(holder.address, "second") as other,
    ):
        eventually(lambda: holder.held == 3, "all are held")

        one.over()

        eventually(lambda: not two.taut(), "the other task of the epoch hears of it")
        with Leash(holder.address, "first") as again:
            eventually(lambda: not again.taut(), "one that Spark starts again ends at once")
        assert other.taut()
    holder.cut()
