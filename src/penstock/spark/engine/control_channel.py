"""The leash: how the driver stops its long tasks at once, and how they talk to it.

Every task holds a connection to the driver.  The driver closes them to stop; if it dies they close by themselves, so that
no task outlives its application.  The other way a task sends lines of JSON: what it did, and why it had to stop.

An epoch ends for all of its tasks when it ends for the first: one that Spark had to start again in the middle would
otherwise go on alone for as long again, and the next epoch, which has the others, would wait for it.
"""

import json
import secrets
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, Self

Line = dict[str, Any]

OVER = "over\n"
"""What a task says whose time is over."""


class Holder:
    """The driver's end."""

    def __init__(self, host: str, hear: Callable[[Line], None]) -> None:
        """Listens on a free port.

        Args:
            host: Address that the tasks can reach: the driver's.
            hear: Called with each line of a task, from a thread of its own.
        """
        self._hear = hear
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((host, 0))
        self._held: dict[socket.socket, str] = {}
        self._over = ""
        self._is_cut = False
        self.address = f"{host}:{self._listener.getsockname()[1]}:{self._token}"
        threading.Thread(target=self._accept, name="leash", daemon=True).start()

    @property
    def held(self) -> int:
        """Number of tasks on the leash."""
        return len(self._held)

    def cut(self) -> None:
        """Stops every task, and those that would come."""
        self._is_cut = True
        self._listener.close()
        for held in list(self._held):
            # Only our half: a task's last words still come in.
            _shut(held)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener is closed: the leash is cut
                return
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        with connection, connection.makefile("r", encoding="utf-8") as lines:
            token, _, epoch = lines.readline().strip().partition(" ")
            if not secrets.compare_digest(token, self._token):
                return
            self._held[connection] = epoch
            try:
                if self._is_cut or epoch == self._over:
                    return
                for line in lines:
                    if line == OVER:
                        self._end(epoch)
                    else:
                        self._hear(json.loads(line))
            except OSError:  # the task's process is gone: Spark starts it again
                return
            finally:
                del self._held[connection]

    def _end(self, epoch: str) -> None:
        """Stops the tasks of an epoch, and those of it that Spark starts again."""
        self._over = (
            epoch  # one epoch begins when the last one is over: there is no other to remember
        )
        for held, of in list(self._held.items()):
            if of == epoch:
                _shut(held)


class Leash:
    """A task's end."""

    def __init__(self, address: str, epoch: str) -> None:
        """Takes hold; a driver that is gone counts as a leash that is cut.

        Args:
            address: Of the driver's end.
            epoch: What the task is part of; any word.
        """
        host, port, token = address.rsplit(":", 2)
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=5)
            self.tell_raw(f"{token} {epoch}")
        except OSError:
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def taut(self) -> bool:
        """Whether the task is to go on."""
        if self._socket is None:
            return False
        readable, _, _ = select.select([self._socket], [], [], 0)
        return not readable  # the driver never writes: readable means closed

    def over(self) -> None:
        """Says that the epoch is over, for all of its tasks."""
        self.tell_raw(OVER.rstrip())

    def tell(self, line: Line) -> None:
        """Sends a line to the driver; one that cannot be sent is lost, and the leash is cut."""
        self.tell_raw(json.dumps(line))

    def tell_raw(self, text: str) -> None:
        """Sends a line of text."""
        if self._socket is not None:
            try:
                self._socket.sendall(text.encode() + b"\n")
            except OSError:
                self._socket = None


def _shut(connection: socket.socket) -> None:
    """Closes our half; that the other side has closed already is no error."""
    try:
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return
