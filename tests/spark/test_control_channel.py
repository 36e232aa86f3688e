"""The control channel: tasks end with their driver, or when it closes the channel."""

from penstock.spark.engine.control_channel import ControlChannel, ControlServer, Line
from penstock.testing import eventually


def test_a_task_runs_until_the_driver_closes_the_channel() -> None:
    server = ControlServer("127.0.0.1", lambda _: None)
    with ControlChannel(server.address, "first") as control:
        eventually(lambda: server.connected == 1, "the task is connected")
        assert control.is_open()

        server.close()

        eventually(lambda: not control.is_open(), "the task notices it")


def test_a_task_that_connects_after_the_close_does_not_start() -> None:
    server = ControlServer("127.0.0.1", lambda _: None)
    server.close()
    with ControlChannel(server.address, "first") as control:
        eventually(lambda: not control.is_open(), "its channel is closed at once")


def test_the_driver_receives_what_a_task_sends_after_the_close() -> None:
    received: list[Line] = []
    server = ControlServer("127.0.0.1", received.append)
    with ControlChannel(server.address, "first") as control:
        eventually(lambda: server.connected == 1, "the task is connected")
        server.close()
        control.send({"task": "streamer", "added": 3})

    eventually(lambda: received == [{"task": "streamer", "added": 3}], "its counts arrive")


def test_a_connection_without_the_token_is_closed_unread() -> None:
    received: list[Line] = []
    server = ControlServer("127.0.0.1", received.append)
    address = server.address.rpartition(":")[0] + ":wrong"
    with ControlChannel(address, "first") as control:
        control.send({"error": "Refused"})
        eventually(lambda: not control.is_open(), "its channel is closed")
    server.close()

    assert received == []


def test_when_one_task_finishes_its_epoch_all_its_tasks_end_including_restarted_ones() -> None:
    server = ControlServer("127.0.0.1", lambda _: None)
    with (
        ControlChannel(server.address, "first") as one,
        ControlChannel(server.address, "first") as two,
        ControlChannel(server.address, "second") as other,
    ):
        eventually(lambda: server.connected == 3, "all are connected")

        one.finish()

        eventually(lambda: not two.is_open(), "the other task of the epoch ends")
        with ControlChannel(server.address, "first") as again:
            eventually(lambda: not again.is_open(), "a task that Spark restarts ends at once")
        assert other.is_open()
    server.close()
