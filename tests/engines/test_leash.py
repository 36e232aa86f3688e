"""The leash: tasks end with their driver, and at its word."""

from penstock.engines.spark.leash import Holder, Leash, Line
from penstock.testing import eventually


def test_a_task_is_taut_until_the_driver_cuts() -> None:
    holder = Holder("127.0.0.1", lambda _: None)
    with Leash(holder.address) as leash:
        eventually(lambda: holder.held == 1, "the task is held")
        assert leash.taut()

        holder.cut()

        eventually(lambda: not leash.taut(), "the task hears of it")


def test_a_task_that_comes_after_the_cut_does_not_begin() -> None:
    holder = Holder("127.0.0.1", lambda _: None)
    holder.cut()
    with Leash(holder.address) as leash:
        eventually(lambda: not leash.taut(), "it is cut at once")


def test_the_driver_hears_last_words_after_the_cut() -> None:
    heard: list[Line] = []
    holder = Holder("127.0.0.1", heard.append)
    with Leash(holder.address) as leash:
        eventually(lambda: holder.held == 1, "the task is held")
        holder.cut()
        leash.tell({"task": "streamer", "added": 3})

    eventually(lambda: heard == [{"task": "streamer", "added": 3}], "its counts arrive")


def test_a_stranger_is_not_heard() -> None:
    heard: list[Line] = []
    holder = Holder("127.0.0.1", heard.append)
    address = holder.address.rpartition(":")[0] + ":wrong"
    with Leash(address) as leash:
        leash.tell({"error": "Refused"})
        eventually(lambda: not leash.taut(), "it is shown the door")
    holder.cut()

    assert heard == []
