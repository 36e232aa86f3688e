"""A server in a directory: what Postgres and Redis have in common."""

import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from penstock.embedded.directories import (
    Account,
    DirectoryLock,
    log_tail,
    make_private,
    private_socket_directory,
    url_file,
    write_private,
)
from penstock.embedded.processes import OwnedProcess
from penstock.errors import ServerUnavailable


class Stoppable(ABC):
    """Something that a ``with`` block starts and stops."""

    @abstractmethod
    def start(self) -> None:
        """Starts it."""

    @abstractmethod
    def stop(self) -> None:
        """Stops it."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class EmbeddedServer(Stoppable):
    """A server that runs in a directory and stops with its owner.

    Attributes:
        directory: Holds data, log, lock and URL.  Created if missing.
        log: The server's output.
        account: Runs the server; None is our own.
    """

    product: ClassVar[str]
    start_timeout_s: ClassVar[float]
    stop_signal: ClassVar[signal.Signals]
    guard_signal: ClassVar[signal.Signals]
    """Sent by the guard when the owner has gone."""

    def __init__(self, directory: Path, account: Account | None = None) -> None:
        self.directory = directory.absolute()
        self.log = self.directory / f"{self.product.lower()}.log"
        self.account = account
        self._lock = DirectoryLock(self.directory / "lock")
        self._process: OwnedProcess | None = None
        self._sockets: Path | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """URL of the server; it stays the same for the life of this object."""

    @property
    def data_directory(self) -> Path:
        """Directory of the server's data."""
        return (self.directory / "data").resolve()

    @property
    def process_id(self) -> int:
        """Process id of the server's main process."""
        if self._process is None:
            raise ServerUnavailable(
                f"The {self.product} in {self.directory} is not running: start() it"
            )
        return self._process.pid

    def is_running(self) -> bool:
        """True if this object has started the server and it is alive."""
        return self._process is not None and self._process.is_running()

    def start(self) -> None:
        """Starts the server, also after a crash.

        Returns when it has recovered its data and answers.
        """
        if self.is_running():
            return
        try:
            make_private(self.directory)
            lock = self._lock.take()
        except OSError as error:
            raise ServerUnavailable(
                f"{self.product} cannot run in {self.directory}: {error.strerror}: "
                f"{error.filename}. Name another directory: --data-directory"
            ) from error
        try:
            self._start(lock)
        except BaseException:
            self.kill()
            self._lock.release()
            raise

    def stop(self) -> None:
        """Shuts down cleanly: rolls back open transactions, writes data to disk."""
        if self._process is not None:
            self._process.end(self.stop_signal)
            self._process = None
        self._lock.release()

    def kill(self) -> None:
        """Sends SIGKILL to every process of the server: to the server, a crash."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def remove(self) -> None:
        """Kills the server and deletes its directory."""
        self.kill()
        self._lock.release()
        shutil.rmtree(self.directory, ignore_errors=True)

    @abstractmethod
    def _command(self, sockets: Path) -> Sequence[str | Path]:
        """Prepares data and configuration; returns program and arguments."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """True if the server answers."""

    def _set_up(self) -> None:
        """Creates what a new server lacks; called after each start.

        Only Postgres has something to set up.
        """

    def _start(self, lock: int) -> None:
        if self._sockets is None:
            self._sockets = private_socket_directory(self, self.account)
        self._process = OwnedProcess(
            self._command(self._sockets),
            log=self.log,
            lock=lock,
            last_signal=self.guard_signal,
            sockets=self._sockets,
            account=self.account,
        )
        self._wait_until_ready()
        self._set_up()
        write_private(url_file(self.directory), self.url + "\n")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while self.is_running() and time.monotonic() < deadline:
            if self._is_ready():
                return
            time.sleep(0.02)
        raise ServerUnavailable(
            f"{self.product} does not start in {self.directory}.\nThe end of {self.log}:\n"
            + log_tail(self.log)
        )

    def _socket_directory(self) -> Path:
        if self._sockets is None:
            raise ServerUnavailable(
                f"The {self.product} in {self.directory} was never started: start() it"
            )
        return self._sockets
