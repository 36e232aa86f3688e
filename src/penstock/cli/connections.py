"""The connections of commands that inspect or repair, opened and closed together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.channels.server import RedisClient, connect_redis
from penstock.cli.command import find_pipeline
from penstock.cli.servers import Servers, servers
from penstock.database.connections import Connection, connect_postgres
from penstock.pipeline import Pipeline
from penstock.settings import Settings

SCHEMA = NAMESPACE = "penstock"
"""Schema and namespace of a pipeline, unless it declares others."""


@dataclass(frozen=True, slots=True)
class Connections:
    """What such a command works with.

    Attributes:
        connection: To Postgres, in autocommit mode.
        client: Of Redis.
        pipeline: None without ``--app``.
        schema: The pipeline's, or the default.
        namespace: The pipeline's, or the default.
        urls: The URLs of both servers.
    """

    connection: Connection
    client: RedisClient
    pipeline: Pipeline | None
    schema: str
    namespace: str
    urls: Servers


@contextmanager
def open_connections(
    settings: Settings, application: str, *, start: bool = False
) -> Iterator[Connections]:
    """Connects to Postgres and Redis.

    Raises:
        DeclarationError: ``--app`` names no pipeline.
        InvalidSetting: One of the two URLs is missing.
        ServerUnavailable: Postgres does not answer.  Redis is not contacted yet.
    """
    pipeline = find_pipeline(settings)
    schema = SCHEMA if pipeline is None else pipeline.schema
    namespace = NAMESPACE if pipeline is None else pipeline.namespace
    with (
        servers(settings, schema=schema, start=start) as urls,
        connect_postgres(
            urls.database_url, application=application, prepare=settings.prepare
        ) as connection,
        connect_redis(urls.redis_url) as client,
    ):
        yield Connections(connection, client, pipeline, schema, namespace, urls)
