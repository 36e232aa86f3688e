"""The two connections of commands that look or mend, opened together and closed together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.servers import Servers, servers
from penstock.cli.verbs import pipeline_if_named
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.database.connections import Connection
    from penstock.pipeline import Pipeline

SCHEMA = NAMESPACE = "penstock"
"""What a pipeline is called in both servers, unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class Connected:
    """What such a command works with.

    Attributes:
        connection: To Postgres, in autocommit mode.
        client: Of Redis.
        pipeline: None if ``--app`` names none.
        schema: The pipeline's, or the usual one.
        namespace: The pipeline's, or the usual one.
        servers: Their URLs.
    """

    connection: "Connection"
    client: Any
    pipeline: "Pipeline | None"
    schema: str
    namespace: str
    servers: Servers


@contextmanager
def connected(settings: Settings, application: str, *, start: bool = False) -> Iterator[Connected]:
    """Connects to both.

    Raises:
        DeclarationError: ``--app`` names no pipeline.
        InvalidSetting: One of the two URLs is missing.
        ServerUnavailable: Postgres does not answer; Redis is not asked yet.
    """
    from penstock.channels.server import connect_redis  # noqa: PLC0415  not for `--help`
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  the same

    pipeline = pipeline_if_named(settings)
    schema = SCHEMA if pipeline is None else pipeline.schema
    namespace = NAMESPACE if pipeline is None else pipeline.namespace
    with (
        servers(settings, schema=schema, start=start) as urls,
        connect_postgres(
            urls.database_url, application=application, prepare=settings.prepare
        ) as connection,
        connect_redis(urls.redis_url) as client,
    ):
        yield Connected(connection, client, pipeline, schema, namespace, urls)
