"""Both servers in one directory, for commands that were given no URL."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from penstock.embedded.directories import make_private
from penstock.embedded.embedded_server import Stoppable
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.redis import EmbeddedRedis
from penstock.errors import ServerUnavailable


class EmbeddedServers(Stoppable):
    """A Postgres and a Valkey with their data in ``postgres`` and ``redis`` of ``directory``."""

    def __init__(
        self,
        directory: Path,
        *,
        postgres_settings: Mapping[str, str] = MappingProxyType({}),
        redis_settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._directory = directory
        self.postgres = EmbeddedPostgres(directory / "postgres", settings=postgres_settings)
        self.redis = EmbeddedRedis(directory / "redis", settings=redis_settings)

    @property
    def database_url(self) -> str:
        """URL of the database ``penstock``."""
        return self.postgres.url

    @property
    def redis_url(self) -> str:
        """URL of Valkey."""
        return self.redis.url

    def start(self) -> None:
        """Starts both, or neither."""
        try:
            make_private(self._directory, shared=True)
        except OSError as error:
            raise ServerUnavailable(
                f"{self._directory} cannot hold servers: {error.strerror}. Name another "
                "directory: --data-directory"
            ) from error
        self.postgres.start()
        try:
            self.redis.start()
        except BaseException:
            self.postgres.stop()
            raise

    def stop(self) -> None:
        """Stops Valkey, then Postgres."""
        try:
            self.redis.stop()
        finally:
            self.postgres.stop()

    def remove(self) -> None:
        """Kills both servers and deletes their directories."""
        self.redis.remove()
        self.postgres.remove()
