"""The connections of commands that inspect or repair, opened and closed together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.channels.server import RedisClient, connect_redis
from penstock.cli.command import find_pipeline
from penstock.cli.servers import Servers, servers
from penstock.database.connections import Connection, connect_postgres
from penstock.database.revisions import check_revision
from penstock.pipeline import Pipeline
from penstock.records import DEFAULT_SCOPE, Scope
from penstock.settings import Settings


@dataclass(frozen=True, slots=True)
class Connections:
    """What such a command works with.

    Attributes:
        connection: To Postgres, in autocommit mode.
        client: Of Redis.
        pipeline: None without ``--app``.
        scope: The pipeline's, or the default.
        urls: The URLs of both servers.
    """

    connection: Connection
    client: RedisClient
    pipeline: Pipeline | None
    scope: Scope
    urls: Servers

    def connect(self) -> Connection:
        """Opens another connection, for a reconciliation."""
        return connect_postgres(self.urls.database_url, application="reconcile", prepare=False)


def get_scope(pipeline: Pipeline | None) -> Scope:
    """The scope of a command: the pipeline's, or the default."""
    return DEFAULT_SCOPE if pipeline is None else pipeline.scope


@contextmanager
def open_connections(settings: Settings, application: str, *, start: bool = False) -> Iterator[Connections]:
    """Connects to Postgres and Redis.

    Raises:
        DeclarationError: ``--app`` names no pipeline.
        InvalidSetting: One of the two URLs is missing.
        SchemaMissing: This release does not work with the schema.
        ServerUnavailable: Postgres does not answer.  Redis is not contacted yet.
    """
    pipeline = find_pipeline(settings)
    scope = get_scope(pipeline)
    with (
        servers(settings, schema=scope.schema, start=start) as urls,
        connect_postgres(urls.database_url, application=application, prepare=settings.prepare) as connection,
        connect_redis(urls.redis_url) as client,
    ):
        check_revision(connection, scope)
        yield Connections(connection, client, pipeline, scope, urls)
