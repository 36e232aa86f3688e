"""Servers of a test run, and a database for each test: a copy of a template that is migrated once.

Loaded by the fixtures of the pytest plugin when a test uses them.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from sqlalchemy import Engine

from penstock.channels.server import connect_redis, redis_errors
from penstock.database.connections import make_engine
from penstock.database.driver_errors import postgres_errors
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis
from penstock.embedded.postgres import create_database, database_url, drop_database
from penstock.schema.initialise import initialise

FORGETFUL = {"fsync": "off", "full_page_writes": "off"}
"""Settings of a Postgres whose data need not survive a crash."""


@contextmanager
def _running(server: EmbeddedPostgres | EmbeddedRedis) -> Iterator[str]:
    try:
        server.start()
        yield server.url
    finally:
        server.remove()


def embedded_postgres(directory: Path) -> AbstractContextManager[str]:
    """Runs a Postgres while the block runs; yields its URL."""
    return _running(EmbeddedPostgres(directory, settings=FORGETFUL))


def embedded_redis(directory: Path) -> AbstractContextManager[str]:
    """Runs a Valkey while the block runs; yields its URL."""
    return _running(EmbeddedRedis(directory, settings={"appendonly": "no"}))


def delete_keys(redis_url: str, namespace: str) -> None:
    """Deletes the keys of the pipelines of a namespace; other keys stay."""
    with connect_redis(redis_url) as client, redis_errors("deleting the keys of the last test"):
        for key in list(client.scan_iter(match=f"{namespace}:*", count=1000)):
            client.unlink(key)


@contextmanager
def temporary_database(server_url: str, template: str | None) -> Iterator[str]:
    """Copies a database while the block runs; yields the URL of the copy."""
    name = _new_name("test")
    with postgres_errors("creating the test's database"):
        create_database(server_url, name, template)
    try:
        yield database_url(server_url, name)
    finally:
        drop_database(server_url, name)


class TemplateDatabases:
    """Databases that are copies of a template.

    There is one template for each name of Penstock's schema.
    """

    def __init__(self, server_url: str, create_tables: Callable[[Engine], object]) -> None:
        """Remember the arguments; the first ``copy`` creates the template."""
        self._server_url = server_url
        self._create_tables = create_tables
        self._templates: dict[str, str] = {}

    def copy(self, schema: str) -> AbstractContextManager[str]:
        """Creates a database while the block runs; yields its URL."""
        if schema not in self._templates:
            self._templates[schema] = self._template(schema)
        return temporary_database(self._server_url, self._templates[schema])

    def close(self) -> None:
        """Drops the templates."""
        for name in self._templates.values():
            drop_database(self._server_url, name)

    def _template(self, schema: str) -> str:
        name = _new_name("template")
        with postgres_errors("creating the template of the tests' databases"):
            create_database(self._server_url, name)
        try:
            url = database_url(self._server_url, name)
            initialise(url, schema)
            engine = make_engine(url, application="test", pooled=False)
            self._create_tables(engine)
        except BaseException:
            drop_database(self._server_url, name)
            raise
        return name


def _new_name(kind: str) -> str:
    """Makes a name that is unique on the server: several runs may share it."""
    return f"penstock_{kind}_{secrets.token_hex(6)}"
