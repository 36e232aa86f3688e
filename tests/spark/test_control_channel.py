"""The control channel: tasks end with their driver, or when it closes the channel."""

import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.errors import DriverUnreachable
from penstock.spark.engine.assignment import Part, Task
from penstock.spark.engine.control_channel import (
    ControlChannel,
    ControlServer,
    Line,
    Plan,
    request_plan,
)
from penstock.testing import eventually

PLAN = Plan("second", (Task((Part(None),)), Task((Part("a", (0, 2)), Part("b", (1,))))))


def listening(receive: Callable[[Line], None] = lambda _: None) -> ControlServer:
    return ControlServer("127.0.0.1", receive=receive, plan=lambda: PLAN)


def test_a_task_runs_until_the_driver_closes_the_channel() -> None:
    server = listening()
    with ControlChannel(server.address, "first") as control:
        eventually(lambda: server.connected == 1, "the task is connected")
        assert control.is_open()

        server.close()

        eventually(lambda: not control.is_open(), "the task notices it")


def test_a_task_that_connects_after_the_close_does_not_start() -> None:
    server = listening()
    server.stop_tasks()
    with ControlChannel(server.address, "first") as control:
        eventually(lambda: not control.is_open(), "its channel is closed at once")
    server.close()


def test_the_driver_receives_what_a_task_sends_after_the_close() -> None:
    received: list[Line] = []
    server = listening(received.append)
    with ControlChannel(server.address, "first") as control:
        eventually(lambda: server.connected == 1, "the task is connected")
        server.close()
        control.send({"task": "streamer", "added": 3})

    eventually(lambda: received == [{"task": "streamer", "added": 3}], "its counts arrive")


def test_a_connection_without_the_token_is_closed_unread() -> None:
    received: list[Line] = []
    server = listening(received.append)
    address = replace(server.address, token="wrong")
    with ControlChannel(address, "first") as control:
        control.send({"error": "Refused"})
        eventually(lambda: not control.is_open(), "its channel is closed")
    server.close()

    assert received == []


def test_when_one_task_finishes_its_epoch_all_its_tasks_end_including_restarted_ones() -> None:
    server = listening()
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


def test_the_query_is_given_the_plan_of_the_next_epoch() -> None:
    server = listening()
    assert request_plan(server.address) == PLAN
    assert not server.was_reached
    server.close()


def test_a_task_that_cannot_reach_the_driver_says_so_within_seconds_and_with_the_mend() -> None:
    """It is not taken for the end of the epoch, which would begin again for ever."""
    server = listening()
    server.close()
    eventually(lambda: not accepts(server), "it listens no longer")

    with pytest.raises(DriverUnreachable, match=r"spark\.penstock\.control\.port=7079"):
        ControlChannel(server.address, "first")


def accepts(server: ControlServer) -> bool:
    try:
        socket.create_connection((server.address.host, server.address.port), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_port_that_is_taken_is_named_before_anything_runs() -> None:
    server = listening()
    with pytest.raises(DriverUnreachable, match=str(server.address.port)):
        ControlServer(
            "127.0.0.1", receive=lambda _: None, plan=lambda: PLAN, port=server.address.port
        )
    server.close()
