"""An embedded Postgres: any version's programs, with settings of your choice."""

import contextlib
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psycopg

from penstock.embedded import databases
from penstock.embedded.directories import hand_over
from penstock.embedded.ownership import read_own, write_private
from penstock.embedded.postgres_binaries import account_for_postgres, is_open, open_directory, postgres_binaries
from penstock.embedded.processes import account_options, environment, free_port
from penstock.embedded.server import EmbeddedServer
from penstock.errors import ServerUnavailable

USER = "postgres"
"""Not ``penstock``: the default search path, ``"$user", public``, would put an application's tables among ours."""

DATABASE = "penstock"

DEFAULT_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "fsync": "on",
        "max_connections": "200",
        "shared_buffers": "128MB",
        "wal_level": "replica",
        "dynamic_shared_memory_type": "mmap",  # /dev/shm is small in containers
    }
)


class EmbeddedPostgres(EmbeddedServer):
    """A Postgres server in a directory; the first start creates the cluster and the database ``penstock``.

    It listens on a Unix socket in a directory that only its owner can enter, and on loopback with a password.

    Args:
        directory: Holds data, log and password.  Created if missing.
        settings: Server settings, which override the defaults and whatever ``ALTER SYSTEM`` has stored.
        binaries: Directory of ``postgres`` and ``initdb``; None is the wheel's.
    """

    product = "Postgres"
    start_timeout_s = 120.0  # a start after a crash includes recovery
    stop_signal = signal.SIGINT
    guard_signal = signal.SIGQUIT

    def __init__(
        self, directory: Path, *, settings: Mapping[str, str] = MappingProxyType({}), binaries: Path | None = None
    ) -> None:
        super().__init__(directory, account_for_postgres())
        self._settings = {**DEFAULT_SETTINGS, **settings}
        self._binaries = binaries
        self._port = 0

    @property
    def url(self) -> str:
        """URL of the database ``penstock`` through the socket, for libpq, psycopg and SQLAlchemy alike.

        Raises:
            ServerUnavailable: The server was never started.
        """
        return self.database_url(DATABASE)

    @property
    def tcp_url(self) -> str:
        """URL of the same database through loopback, for a client such as a proxy."""
        return f"postgresql://{USER}:{self._password()}@127.0.0.1:{self._port}/{DATABASE}"

    def database_url(self, name: str) -> str:
        """URL of any database of this server, through the socket.

        Raises:
            ServerUnavailable: The server was never started.
        """
        return f"postgresql://{USER}@/{name}?host={self._socket_directory()}&port={self._port}"

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database, empty or as a copy of ``template``, and return its URL."""
        databases.create_database(self.database_url("postgres"), name, template)
        return self.database_url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, and terminate its sessions."""
        databases.drop_database(self.database_url("postgres"), name)

    def remove(self) -> None:
        """Kill the server and delete its directory, and its data if they had to be stored elsewhere."""
        is_elsewhere = (self.directory / "data").is_symlink()
        elsewhere = self.data_directory.parent
        super().remove()
        if is_elsewhere:
            shutil.rmtree(elsewhere, ignore_errors=True)

    def _command(self, sockets: Path) -> Sequence[str | Path]:
        binaries = self._binaries or postgres_binaries(self._account)
        self._port = self._port or free_port()
        if not (self.data_directory / "PG_VERSION").exists():
            self._create_cluster(binaries)
        self._remove_stale_pid_file()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self._port),
            "unix_socket_directories": str(sockets),
            "unix_socket_permissions": "0700",
            **self._settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [binaries / "postgres", "-D", self.data_directory, *options]

    def _create_cluster(self, binaries: Path) -> None:
        """Create the cluster beside its place and rename it, so that an interrupted start leaves no partial one."""
        place = self._place_for_data()
        fresh = place.with_name(f"data.new-{secrets.token_hex(4)}")
        fresh.mkdir(0o700)
        hand_over(fresh, self._account)
        password = self._new_password()
        try:
            self._initdb(binaries, fresh, password)
            shutil.rmtree(place, ignore_errors=True)
            fresh.rename(place)
        finally:
            password.unlink(missing_ok=True)
            shutil.rmtree(fresh, ignore_errors=True)

    def _place_for_data(self) -> Path:
        """``data`` in our directory; if the server's account cannot reach that, a directory elsewhere and a link to it."""
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
            env=environment(),
            **account_options(self._account),
        )
        if done.returncode != 0:
            raise ServerUnavailable(f"Postgres could not create a cluster in {data}.\ninitdb: {done.stderr.strip()}")

    def _new_password(self) -> Path:
        """Generate a password and keep it in ``password``; returns a copy that ``initdb`` can read."""
        secret = secrets.token_urlsafe(24)
        for_initdb = self._socket_directory() / "password"
        for path in (self.directory / "password", for_initdb):
            write_private(path, secret)
        hand_over(for_initdb, self._account)
        return for_initdb

    def _password(self) -> str:
        return read_own(self.directory / "password")

    def _remove_stale_pid_file(self) -> None:
        """Remove the pid file of a killed server: its process id may belong to another process by now.

        Postgres removes the file itself unless a process with that id is alive.  We hold the lock of the directory, so
        the only other possibility is a server that was started by hand, whose command line shows that it is a Postgres.
        """
        pid_file = self.data_directory / "postmaster.pid"
        if not pid_file.exists():
            return
        pid = int(pid_file.read_text().partition("\n")[0].strip() or 0)
        command = Path("/proc", str(pid), "cmdline")
        with contextlib.suppress(OSError):
            if b"postgres" in command.read_bytes():
                return  # Postgres checks further, and refuses to start if it is a server of this directory
        pid_file.unlink()

    def _is_ready(self) -> bool:
        try:
            psycopg.connect(self.database_url("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError as error:
            if f'role "{USER}" does not exist' in str(error):
                raise ServerUnavailable(
                    f"{self.directory} holds data of another release, or of another program. "
                    f"Move it away, or remove it: rm -r {self.directory}"
                ) from error
            return False
        return True

    def _set_up(self) -> None:
        query = "SELECT FROM pg_database WHERE datname = %s"
        with psycopg.connect(self.database_url("postgres")) as connection:
            exists = connection.execute(query, [DATABASE]).fetchone() is not None
        if not exists:
            self.create_database(DATABASE)
