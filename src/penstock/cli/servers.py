"""Which Postgres and Redis a command works with: those of the URLs, or a pair of our own.

Without URLs the pair in ``data_directory`` is used.  The first command that needs it runs it, and ends it when it ends
itself; the others find its URLs there, in files that only its owner can read.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.logs import hide
from penstock.cli.render import say
from penstock.errors import InvalidSetting, ServerUnavailable
from penstock.settings import Secret, Settings


@dataclass(frozen=True, slots=True, repr=False)
class Servers:
    """The URLs of both servers.

    Attributes:
        database_url: Of Postgres.
        redis_url: Of Redis.
        owned: They are ours, and end with this command.
    """

    database_url: str
    redis_url: str
    owned: bool = False


@contextmanager
def servers(settings: Settings, *, schema: str, start: bool = True) -> Iterator[Servers]:
    """The servers, while the command runs.

    Args:
        settings: With both URLs, or none.
        schema: Made in a Postgres of our own.
        start: False for commands that only look: they do not make a Postgres to find it empty.

    Raises:
        InvalidSetting: One of the two URLs is missing.
        ServerUnavailable: There are no URLs, and the servers of our own cannot be run.
    """
    if settings.database_url is not None and settings.redis_url is not None:
        yield Servers(settings.database_url.value, settings.redis_url.value)
        return
    if settings.database_url is not None or settings.redis_url is not None:
        missing = "redis-url" if settings.redis_url is None else "database-url"
        raise InvalidSetting(
            f"--{missing} is missing: give both URLs, or none to work with servers in {settings.data_directory}"
        )
    running = running_servers(settings.data_directory)
    if running is not None:
        yield running
        return
    if not start and not (settings.data_directory / "postgres").is_dir():
        raise ServerUnavailable(
            f"no --database-url and --redis-url were given, and {settings.data_directory} holds no servers of our own. "
            "Give them, or start something first: penstock run, penstock demo"
        )
    with _own(settings.data_directory, schema) as own:
        yield own


@contextmanager
def _own(directory: Path, schema: str) -> Iterator[Servers]:
    # Embedded servers come from optional wheels: only who uses them needs these.
    from penstock.database.initialise import initialise  # noqa: PLC0415
    from penstock.embedded import EmbeddedServers  # noqa: PLC0415

    embedded = EmbeddedServers(directory)
    try:
        embedded.start()
    except ServerUnavailable:
        # Another command may have been starting them at this moment.
        running = running_servers(directory)
        if running is None:
            raise
        yield running
        return
    try:
        hide([Secret(embedded.database_url), Secret(embedded.redis_url)])
        say(f"Postgres and Valkey of our own run in {directory}; they end with this command.")
        initialise(embedded.database_url, schema)
        yield Servers(embedded.database_url, embedded.redis_url, owned=True)
    finally:
        embedded.stop()


def running_servers(directory: Path) -> Servers | None:
    """The servers that another process runs in ``directory``; None if they do not answer."""
    database_url, redis_url = _noted(directory / "postgres"), _noted(directory / "redis")
    if database_url is None or redis_url is None or not _answer(database_url, redis_url):
        return None
    hide([Secret(database_url), Secret(redis_url)])
    return Servers(database_url, redis_url)


def _noted(directory: Path) -> str | None:
    """The URL that the owner of a server has written down."""
    try:
        return (directory / "url").read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _answer(database_url: str, redis_url: str) -> bool:
    from penstock.channels.server import connect_redis, redis_errors  # noqa: PLC0415  not for `--help`
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  the same

    try:
        connect_postgres(database_url, application="looking for servers").close()
        with connect_redis(redis_url) as client, redis_errors("looking for servers"):
            client.ping()
    except ServerUnavailable:
        return False
    return True
