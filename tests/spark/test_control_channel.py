"""The control channel: tasks end with their driver, or when it closes the channel."""

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from penstock.engines.spark.assignment import Part, Task
from penstock.engines.spark.control_channel import (
    MAX_STRANGERS,
    Address,
    ControlChannel,
    ControlServer,
    Line,
    TaskPlan,
    request_plan,
)
from penstock.engines.spark.spark_errors import name_reason
from penstock.errors import DriverUnreachable
from penstock.testing import eventually

PLAN = TaskPlan("second", (Task((Part(None),)), Task((Part("a", (0, 2)), Part("b", (1,))))))


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
    assert not accepts(server)


def test_a_connected_task_makes_room_for_no_other_connection() -> None:
    server = listening()
    with ControlChannel(server.address, "first") as control:
        for _ in range(MAX_STRANGERS + 1):
            assert request_plan(server.address) == PLAN
        assert control.is_open()
    server.close()


def test_a_task_that_cannot_reach_the_driver_says_so_within_seconds_and_with_the_mend() -> None:
    """It is not taken for the end of the epoch, which would begin again for ever."""
    server = listening()
    server.close()
    assert not accepts(server)

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
        ControlServer("127.0.0.1", receive=lambda _: None, plan=lambda: PLAN, port=server.address.port)
    server.close()


def read_to_the_end(connection: socket.socket, timeout_s: float = 60) -> bytes:
    """What the driver sends until it closes the connection; a time-out if it does not close it."""
    connection.settimeout(timeout_s)
    read = b""
    while more := connection.recv(1000):
        read += more
    return read


def say(server: ControlServer, *words: bytes) -> socket.socket:
    connection = socket.create_connection((server.address.host, server.address.port), timeout=60)
    for word in words:
        connection.sendall(word)
    return connection


@pytest.fixture
def uncaught(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors that ended a thread, which Python prints with their tracebacks."""
    ended: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(repr(args.exc_value)))
    return ended


@contextmanager
def most_files(limit: int) -> Iterator[None]:
    """Lets this process have files up to a number only."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def next_file() -> int:
    """The number that the next file of this process gets."""
    os.close(number := os.dup(0))
    return number


def test_tasks_are_served_beside_eleven_hundred_idle_connections() -> None:
    """With fewer files left than those would take at the driver."""
    server = listening()
    with most_files(next_file() + 1300), ExitStack() as idle:
        for _ in range(1100):
            idle.enter_context(say(server))
        assert request_plan(server.address) == PLAN
        with ControlChannel(server.address, "first") as control:
            eventually(lambda: server.connected == 1, "a task is connected")
            assert control.is_open()
    server.check()
    server.close()


def test_the_driver_takes_connections_again_once_it_has_files_again() -> None:
    server = listening()
    clients = [socket.socket() for _ in range(8)]  # some, should others' files be closed meanwhile
    with capture_logs() as logged:
        with most_files(next_file()):
            for client in clients:
                client.connect((server.address.host, server.address.port))
            eventually(lambda: logged, "the connection cannot be taken")

        assert request_plan(server.address) == PLAN
    assert [line["event"] for line in logged] == ["connection refused"]
    for client in clients:
        client.close()
    server.close()


@pytest.mark.slow
def test_a_stranger_is_cut_off_after_two_hundred_bytes_or_three_seconds(uncaught: list[str]) -> None:
    """Three seconds, because that is the limit."""
    server = listening()
    with say(server) as silent, say(server, b"a") as slow:
        for wrong in (b"\xff\xfe\n", "é plan\n".encode(), b"\n", b"wrong plan\n", b"x" * 1000):
            # It may be closed with bytes unread.
            with say(server, wrong) as stranger, suppress(ConnectionResetError):
                assert read_to_the_end(stranger) == b""
        assert read_to_the_end(silent) == b""
        assert read_to_the_end(slow) == b""
    assert server.connected == 0
    assert uncaught == []
    server.close()


def test_a_line_that_a_dying_task_has_not_finished_is_left_out(uncaught: list[str]) -> None:
    received: list[Line] = []
    server = listening(received.append)
    token = server.address.token.encode()
    with say(server, token + b' first\n{"added": 3}\n{"add'):
        eventually(lambda: received == [{"added": 3}], "the finished line arrives")
    eventually(lambda: server.connected == 0, "its end is noticed")

    assert uncaught == []
    server.close()


@pytest.mark.slow  # three seconds, likewise
def test_a_driver_that_does_not_answer_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1], "token")

        with pytest.raises(DriverUnreachable, match="does not say what to run next"):
            request_plan(address)


def test_the_supervisor_notices_that_nobody_takes_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlServer, "_accept", lambda _: None)
    server = listening()
    eventually(lambda: not server._thread.is_alive(), "its thread has ended")

    with pytest.raises(DriverUnreachable, match="takes no connections at 127"):
        server.check()
    server.close()
    server.check()


def test_the_reason_of_a_failure_is_the_end_of_its_traceback() -> None:
    def raised(said: str) -> str:
        return f"Traceback (most recent call last):\n  File 'a.py', line 1\n    f()\n{said}\n\tat org.apache.spark\n"

    assert name_reason(raised("penstock.errors.DriverUnreachable: no answer")) == (
        "penstock.errors.DriverUnreachable: no answer"
    )
    assert name_reason("[A] Failed: " + raised("ValueError: secret")) == "ValueError"
    assert name_reason("[STREAM_FAILED] Query ended\nmore") == "[STREAM_FAILED] Query ended"
    assert name_reason("") == ""
