"""The control channel: stops long tasks at once, and carries their counts and errors to the driver.

Every task keeps a TCP connection to the driver open.  The driver closes these connections to stop its tasks; if the driver
dies, the operating system closes them, so that no task outlives its application.  In the other direction a task sends
lines of JSON: what it has done, and the error that ended it.

When any task of an epoch finishes, all do.  Otherwise a task that Spark restarted mid-epoch would run a full epoch longer,
and the next epoch, which has the other tasks, would wait for it.
"""

import json
import secrets
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, Self

Line = dict[str, Any]

FINISHED = "finished\n"
"""The line that a task sends when its epoch is over."""


class ControlServer:
    """The driver's end: one connection for each running task."""

    def __init__(self, host: str, receive: Callable[[Line], None]) -> None:
        """Listens on a free port.

        Args:
            host: Address of the driver that the tasks can reach.
            receive: Called with each line that a task sends, on that connection's own thread.
        """
        self._receive = receive
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((host, 0))
        self._epochs: dict[socket.socket, str] = {}
        self._finished_epoch = ""
        self._is_closed = False
        self.address = f"{host}:{self._listener.getsockname()[1]}:{self._token}"
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    @property
    def connected(self) -> int:
        """Number of tasks that are connected."""
        return len(self._epochs)

    def close(self) -> None:
        """Stops every task, including those that connect later."""
        self._is_closed = True
        self._listener.close()
        for connection in list(self._epochs):
            # Our half only: a task can still send its last counts.
            _shut_down(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener is closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("r", encoding="utf-8") as lines:
            token, _, epoch = lines.readline().strip().partition(" ")
            if not secrets.compare_digest(token, self._token):
                return
            self._epochs[connection] = epoch
            try:
                if self._is_closed or epoch == self._finished_epoch:
                    return
                for line in lines:
                    if line == FINISHED:
                        self._finish(epoch)
                    else:
                        self._receive(json.loads(line))
            except OSError:  # the task's process is gone: Spark restarts it
                return
            finally:
                del self._epochs[connection]

    def _finish(self, epoch: str) -> None:
        """Stops the tasks of an epoch, and those of it that Spark restarts."""
        # One epoch starts only after the previous one has ended, so the last one is enough to remember.
        self._finished_epoch = epoch
        for connection, its_epoch in list(self._epochs.items()):
            if its_epoch == epoch:
                _shut_down(connection)


class ControlChannel:
    """A task's end."""

    def __init__(self, address: str, epoch: str) -> None:
        """Connects; if the driver cannot be reached, the channel is closed from the start.

        Args:
            address: ``ControlServer.address``.
            epoch: The epoch that the task belongs to; any word.
        """
        host, port, token = address.rsplit(":", 2)
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=5)
            self._send_text(f"{token} {epoch}")
        except OSError:
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def is_open(self) -> bool:
        """Whether the task should go on."""
        if self._socket is None:
            return False
        readable, _, _ = select.select([self._socket], [], [], 0)
        return not readable  # the driver never writes: readable means closed

    def send(self, line: Line) -> None:
        """Sends a line to the driver; if that fails, the line is lost and the channel is closed."""
        self._send_text(json.dumps(line))

    def finish(self) -> None:
        """Ends the epoch for all of its tasks."""
        self._send_text(FINISHED.rstrip())

    def _send_text(self, text: str) -> None:
        if self._socket is not None:
            try:
                self._socket.sendall(text.encode() + b"\n")
            except OSError:
                self._socket = None


def _shut_down(connection: socket.socket) -> None:
    """Closes our half; it is no error if the other side has closed already."""
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return
