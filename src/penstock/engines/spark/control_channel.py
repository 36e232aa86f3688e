"""The control channel: plans epochs, stops tasks at once, carries their counts and errors.

Every task keeps a TCP connection to the driver open.  The driver closes these connections to stop
its tasks; if the driver dies, the operating system closes them, so that no task outlives its
application.  In the other direction a task sends lines of JSON: what it has done, and the error
that ended it.

When any task of an epoch finishes, all do.  Otherwise a task that Spark restarted mid-epoch would
run a full epoch longer, and the next epoch, which has the other tasks, would wait for it.

Before each epoch the query asks here for its plan: the tasks that the slots of that moment allow.
"""

import json
import secrets
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hmac import compare_digest
from time import monotonic
from typing import Any, Self

from penstock.engines.spark.assignment import Task
from penstock.errors import DriverUnreachable

Line = dict[str, Any]

FINISHED = "finished\n"
"""The line that a task sends when its epoch is over."""

PLAN = "plan"
"""The word that the query sends in the place of an epoch, to get the next one."""

CONNECT_TIMEOUT_S = 3.0

TOKEN_TIMEOUT_S = 3.0
"""Seconds that a connection may take to show the token."""

FIRST_LINE_BYTES = 200
"""Longest line that is read before that."""

MAX_STRANGERS = 64
"""Limit of connections that have not shown the token; the oldest makes room for the next.

A task shows it at once.
"""

BACKLOG = 1024
"""Connections that the operating system keeps until they are taken.

It drops more, and a task would wait a second to try again.
"""

ACCEPT_PAUSE_S = 0.1
"""Pause when a connection cannot be taken, because files or threads are used up, in seconds."""


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """An epoch, by a random word, and what runs in it."""

    epoch: str
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """Address at which the driver listens, and the secret that it asks for."""

    host: str
    port: int
    token: str

    def connect(self) -> socket.socket:
        """Connects and sends the token."""
        try:
            return socket.create_connection((self.host, self.port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            raise DriverUnreachable(
                f"{socket.gethostname()} cannot connect to the driver at {self.host}:{self.port} "
                f"({error.strerror or type(error).__name__}). Set spark.driver.host to an address "
                "that executors reach, and open the port, which --conf "
                "spark.penstock.control.port=7079 fixes"
            ) from error


class ControlServer:
    """The driver's end: one connection for each running task."""

    def __init__(
        self,
        host: str,
        *,
        receive: Callable[[Line], None],
        plan: Callable[[], TaskPlan],
        bind: str | None = None,
        port: int = 0,
    ) -> None:
        """Listens at ``bind``, by default ``host``, which the tasks can reach.

        Port 0 takes a free one.  ``receive`` is called with each line that a task sends, on that
        connection's own thread; ``plan`` for the next epoch.
        """
        from structlog import get_logger  # noqa: PLC0415  planners load this module, too, and need nothing of it

        self._log = get_logger("penstock.spark")
        self._receive, self._plan = receive, plan
        try:
            self._listener = socket.create_server((bind or host, port), backlog=BACKLOG)
        except OSError as error:
            raise DriverUnreachable(
                f"the driver cannot listen at {bind or host}:{port or 'any port'} "
                f"({error.strerror}): see spark.driver.bindAddress and spark.penstock.control.port"
            ) from error
        self._epochs: dict[socket.socket, str] = {}
        self._strangers: dict[socket.socket, None] = {}
        self._finished_epoch = ""
        self._is_closed = False
        self._stopped = threading.Event()
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self.was_asked = False
        """True if a plan has ever been asked for."""
        self.was_reached = False
        """True if a task has ever connected."""
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> int:
        """Count of connected tasks."""
        return len(self._epochs)

    def check(self) -> None:
        """Raises if connections are no longer accepted: no epoch would begin or end."""
        if not self._thread.is_alive() and not self._stopped.is_set():
            raise DriverUnreachable(
                f"the driver takes no connections at {self.address.host}:{self.address.port} any "
                "more: see its log for thread 'control', and start it again; nothing is lost"
            )

    def stop_tasks(self) -> None:
        """Stops every task, including those that connect later."""
        self._is_closed = True
        for connection in list(self._epochs):
            # Our half only: a task can still send its last counts.
            _shut_down(connection)

    def close(self) -> None:
        """Stops every task, and listens no longer."""
        self.stop_tasks()
        self._stop_listening()

    def _stop_listening(self) -> None:
        self._stopped.set()
        # otherwise the thread that waits takes one more connection
        _shut_down(self._listener, socket.SHUT_RDWR)
        self._listener.close()

    def finish(self, epoch: str) -> None:
        """Stops the tasks of an epoch, and those of it that Spark restarts."""
        # One epoch starts only after the previous one has ended, so the last one is enough to
        # remember.
        self._finished_epoch = epoch
        for connection, its_epoch in list(self._epochs.items()):
            if its_epoch == epoch:
                _shut_down(connection)

    def _accept(self) -> None:
        is_failing = False
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
                self._begin(connection)
                is_failing = False
            except (OSError, RuntimeError) as error:  # no more files, or no more threads
                if self._stopped.is_set():
                    return
                if not is_failing:
                    self._log.warning("connection refused", reason=str(error))
                is_failing = True
                self._stopped.wait(ACCEPT_PAUSE_S)

    def _begin(self, connection: socket.socket) -> None:
        """Serves a connection on a thread of its own.

        The stranger who has waited longest makes room.
        """
        self._strangers[connection] = None
        while len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest, None)
            _shut_down(oldest, socket.SHUT_RDWR)
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except RuntimeError:
            self._strangers.pop(connection, None)
            connection.close()
            raise

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the task's process is gone: Spark restarts it
            try:
                token, _, epoch = _read_first_line(connection).partition(b" ")
                if not compare_digest(token, self.address.token.encode()):
                    return
            finally:
                self._strangers.pop(connection, None)
            connection.settimeout(None)
            if epoch == PLAN.encode():
                self._send_plan(connection)
            else:
                self._follow(connection, epoch.decode())

    def _follow(self, connection: socket.socket, epoch: str) -> None:
        """Handles the lines of a task until it ends."""
        self._epochs[connection], self.was_reached = epoch, True
        try:
            if self._is_closed or epoch == self._finished_epoch:
                return
            with connection.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    if line == FINISHED:
                        self.finish(epoch)
                    elif line.endswith("\n"):  # otherwise its process was ended while it wrote
                        self._receive(json.loads(line))
        finally:
            del self._epochs[connection]

    def _send_plan(self, connection: socket.socket) -> None:
        self.was_asked = True
        connection.sendall(json.dumps(asdict(self._plan())).encode())


def _read_first_line(connection: socket.socket) -> bytes:
    """Reads the first line of a connection, byte by byte: another reader takes what follows."""
    deadline, line = monotonic() + TOKEN_TIMEOUT_S, b""
    while len(line) < FIRST_LINE_BYTES:
        if (remaining := deadline - monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        read = connection.recv(1)
        if read in {b"", b"\n"}:
            break
        line += read
    return line


def request_plan(address: Address) -> TaskPlan:
    """Asks the driver for the plan of the next epoch."""
    try:
        with address.connect() as connection:
            connection.sendall(f"{address.token} {PLAN}\n".encode())
            with connection.makefile("r", encoding="utf-8") as answer:
                values = json.loads(answer.read())
    except (OSError, ValueError) as error:
        raise DriverUnreachable(
            f"the driver at {address.host}:{address.port} does not say what to run next "
            f"({type(error).__name__}): see its log"
        ) from error
    return TaskPlan(values["epoch"], tuple(map(Task.parse, values["tasks"])))


class ControlChannel:
    """A task's end."""

    def __init__(self, address: Address, epoch: str) -> None:
        """Connects; ``epoch`` is the one that the task belongs to."""
        self._socket: socket.socket | None = address.connect()
        self._send_text(f"{address.token} {epoch}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def is_open(self) -> bool:
        """True if the task should go on."""
        if self._socket is None:
            return False
        closed = select.poll()  # not select(), which knows no descriptor above 1,023
        closed.register(self._socket, select.POLLIN)
        return not closed.poll(0)  # the driver never writes: readable means closed

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


def _shut_down(connection: socket.socket, how: int = socket.SHUT_WR) -> None:
    """Closes our half; it is no error if the other side has closed already."""
    with suppress(OSError):
        connection.shutdown(how)
