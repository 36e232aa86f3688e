"""A Postgres of our own: any version's programs, our settings, and every way to hurt it."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import psycopg
from psycopg import sql

from penstock.embedded import processes
from penstock.embedded.postgres_binaries import (
    account_for_postgres,
    is_open,
    open_directory,
    postgres_binaries,
)
from penstock.errors import ServerUnavailable

USER = "postgres"
"""Not ``penstock``: the default search path, ``"$user", public``, would put an application's tables among ours."""

DATABASE = "penstock"

_FILE_COPY_SINCE = 150000

START_TIMEOUT_S = 120.0
"""Recovery after a crash is part of a start, so the limit is generous."""

DEFAULT_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "fsync": "on",
        "max_connections": "200",
        "shared_buffers": "128MB",
        "wal_level": "replica",
        "dynamic_shared_memory_type": "mmap",  # /dev/shm is small in containers
    }
)


class EmbeddedPostgres:
    """A Postgres server in a directory; the first start makes the cluster and the database ``penstock``.

    It listens on a Unix socket in a directory that only its owner can enter, and on loopback with a password.

    Args:
        directory: Where data, log and password live.  Made if missing.
        settings: Server settings, in front of the defaults and of what ``ALTER SYSTEM`` has stored.
        binaries: Directory of ``postgres`` and ``initdb``; the wheel's when None.
    """

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
        binaries: Path | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self.log = self.directory / "postgres.log"
        self._settings = processes.merged(DEFAULT_SETTINGS, settings)
        self._binaries = binaries
        self._account = account_for_postgres()
        self._lock = processes.DirectoryLock(self.directory / "lock")
        self._process: processes.OwnedProcess | None = None
        self._sockets: Path | None = None
        self._port = 0

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
        """URL of the database ``penstock`` through the socket: for libpq, psycopg and SQLAlchemy alike.

        Raises:
            ServerUnavailable: The server was never started.
        """
        return self.url_of(DATABASE)

    @property
    def tcp_url(self) -> str:
        """URL of the same database through loopback: for what stands between, such as a proxy."""
        return f"postgresql://{USER}:{self._password()}@127.0.0.1:{self._port}/{DATABASE}"

    @property
    def data_directory(self) -> Path:
        """The cluster's directory, for Postgres 'PGDATA'."""
        return (self.directory / "data").resolve()

    @property
    def process_id(self) -> int:
        """Process id of the postmaster.

        Raises:
            ServerUnavailable: The server is not running.
        """
        if self._process is None:
            raise ServerUnavailable(f"The Postgres in {self.directory} is not running: start() it")
        return self._process.pid

    def is_running(self) -> bool:
        """Whether we have started the server and it still lives."""
        return self._process is not None and self._process.is_running()

    def url_of(self, database: str) -> str:
        """URL of any database of this server, through the socket.

        Raises:
            ServerUnavailable: The server was never started.
        """
        if self._sockets is None:
            raise ServerUnavailable(
                f"The Postgres in {self.directory} was never started: start() it"
            )
        return f"postgresql://{USER}@/{database}?host={self._sockets}&port={self._port}"

    def start(self) -> None:
        """Start the server, after a crash as well, and return when it takes connections.

        Raises:
            ServerUnavailable: Another process runs a server here, or Postgres does not start.
        """
        if self.is_running():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = self._lock.take()
        try:
            self._start(lock)
        except BaseException:
            self.kill()
            self._lock.release()
            raise

    def stop(self) -> None:
        """Stop in the fast way: open transactions are rolled back, everything is written out."""
        if self._process is not None:
            self._process.end(signal.SIGINT)
            self._process = None
        self._lock.release()

    def kill(self) -> None:
        """SIGKILL for the postmaster and every process of the server: a crash, as far as Postgres can tell."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def restart(self) -> None:
        """Stop and start; the URL stays."""
        self.stop()
        self.start()

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database, empty or as a copy of ``template``, and return its URL."""
        command = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
            if template is not None:
                command += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
                if connection.info.server_version >= _FILE_COPY_SINCE:
                    # A small database is copied in a third of the time, where nobody waits for the disk.
                    command += sql.SQL(" STRATEGY FILE_COPY")
            connection.execute(command)
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, and end the sessions that are still in it."""
        self._execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        )

    def copy_to(self, target: Path) -> None:
        """Copy the cluster as it is now to ``target``, which must not exist; a running server is restarted for it."""
        was_running = self.is_running()
        self.stop()
        shutil.copytree(self.data_directory, target, symlinks=True)
        if was_running:
            self.start()

    def restore(self, source: Path) -> None:
        """Put the cluster of ``copy_to`` in the place of ours: an older past; a running server is killed for it."""
        was_running = self.is_running()
        self.kill()
        shutil.rmtree(self.data_directory)
        shutil.copytree(source, self.data_directory, symlinks=True)
        (self.data_directory / "postmaster.pid").unlink(missing_ok=True)
        processes.hand_over(self.data_directory, self._account)
        if was_running:
            self.start()

    def remove(self) -> None:
        """Kill the server and delete its directory, with data that had to live elsewhere."""
        self.kill()
        self._lock.release()
        if (self.directory / "data").is_symlink():
            shutil.rmtree(self.data_directory.parent, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, lock: int) -> None:
        binaries = self._binaries or postgres_binaries(self._account)
        if self._sockets is None:
            self._sockets = processes.private_socket_directory(self, self._account)
            self._port = processes.free_port()
        if not (self.data_directory / "PG_VERSION").exists():
            self._make_cluster(binaries)
        self._forget_dead_postmaster()
        self._process = processes.OwnedProcess(
            [binaries / "postgres", "-D", self.data_directory, *self._options(self._sockets)],
            log=self.log,
            lock=lock,
            last_signal=signal.SIGQUIT,
            sockets=self._sockets,
            account=self._account,
        )
        self._wait_until_ready()
        self._ensure_database()
        processes.note_url(self.directory, self.url)

    def _options(self, sockets: Path) -> list[str]:
        settings = processes.merged(
            {
                "listen_addresses": "127.0.0.1",
                "port": str(self._port),
                "unix_socket_directories": str(sockets),
                "unix_socket_permissions": "0700",
            },
            self._settings,
        )
        return [f"--{name}={value}" for name, value in settings.items()]

    def _make_cluster(self, binaries: Path) -> None:
        """Make the cluster beside its place and move it there whole, so that an interruption leaves nothing."""
        place = self._place_for_data()
        fresh = place.with_name(f"data.new-{secrets.token_hex(4)}")
        fresh.mkdir(0o700)
        processes.hand_over(fresh, self._account)
        password = self._new_password()
        try:
            self._initdb(binaries, fresh, password)
            shutil.rmtree(place, ignore_errors=True)
            fresh.rename(place)
        finally:
            password.unlink(missing_ok=True)
            shutil.rmtree(fresh, ignore_errors=True)

    def _place_for_data(self) -> Path:
        """``data`` in our directory, or, when the server's account cannot reach that, elsewhere with a link to it."""
        link = self.directory / "data"
        if self._account is None or is_open(self.directory):
            return link
        if link.is_symlink():
            link.unlink()
        place = open_directory() / "data"
        link.symlink_to(place)
        return place

    def _initdb(self, binaries: Path, data: Path, password: Path) -> None:
        done = subprocess.run(  # noqa: S603  the program of the caller's Postgres
            [
                *(binaries / "initdb", f"--pgdata={data}", f"--username={USER}"),
                *(f"--pwfile={password}", "--auth-local=trust", "--auth-host=scram-sha-256"),
                *("--encoding=UTF8", "--locale=C", "--no-sync"),
            ],
            check=False,
            capture_output=True,
            text=True,
            cwd="/",
            env=processes.environment(),
            **processes.as_account(self._account),
        )
        if done.returncode != 0:
            raise ServerUnavailable(
                f"Postgres could not make a cluster in {data}.\ninitdb says: {done.stderr.strip()}"
            )

    def _new_password(self) -> Path:
        """A new password, kept in ``password`` for us; returns the copy that ``initdb`` can read."""
        secret = secrets.token_urlsafe(24)
        kept = self.directory / "password"
        kept.unlink(missing_ok=True)
        for_initdb = self._socket_directory() / "password"
        for path in (kept, for_initdb):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secret)
        processes.hand_over(for_initdb, self._account)
        return for_initdb

    def _password(self) -> str:
        return (self.directory / "password").read_text()

    def _socket_directory(self) -> Path:
        if self._sockets is None:
            raise ServerUnavailable(
                f"The Postgres in {self.directory} was never started: start() it"
            )
        return self._sockets

    def _forget_dead_postmaster(self) -> None:
        """Remove the pid file of a killed server: its number may belong to somebody else by now.

        Postgres removes it itself unless a process with that number lives.  We hold the lock of the directory, so only
        a server that was started by hand can be meant, and its command line says so.
        """
        pid_file = self.data_directory / "postmaster.pid"
        if not pid_file.exists():
            return
        pid = int(pid_file.read_text().partition("\n")[0].strip() or 0)
        command = Path("/proc", str(pid), "cmdline")
        with contextlib.suppress(OSError):
            if b"postgres" in command.read_bytes():
                return  # Postgres itself looks closer, and refuses if it is a server of this directory
        pid_file.unlink()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.is_running() and time.monotonic() < deadline:
            try:
                psycopg.connect(self.url_of("postgres"), connect_timeout=5).close()
            except psycopg.OperationalError as error:
                if f'role "{USER}" does not exist' in str(error):
                    self.kill()
                    raise ServerUnavailable(
                        f"{self.directory} holds the data of another release, or of somebody else. "
                        f"Move it away, or remove it: rm -r {self.directory}"
                    ) from error
                time.sleep(0.02)
            else:
                return
        raise ServerUnavailable(
            f"Postgres does not start in {self.directory}.\nThe end of {self.log}:\n"
            + processes.last_words(self.log)
        )

    def _ensure_database(self) -> None:
        with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
            query = "SELECT FROM pg_database WHERE datname = %s"
            if connection.execute(query, [DATABASE]).fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))

    def _execute(self, command: sql.Composed) -> None:
        with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
            connection.execute(command)
