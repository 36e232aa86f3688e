"""Statements of ours on the connection of somebody's session, plain or asyncio: in the same transaction."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy import Connection as EngineConnection
from sqlalchemy.util import await_only

Row = tuple[Any, ...]


class Rows(Protocol):
    """What a statement gave."""

    @property
    def rowcount(self) -> int:
        """Rows that it gave or changed."""

    def fetchone(self) -> Row | None:
        """The next row."""

    def fetchall(self) -> list[Row]:
        """All rows."""

    def __iter__(self) -> Iterator[Row]: ...


class Executor(Protocol):
    """Executes statements; a connection of psycopg is one."""

    def execute(self, query: bytes, params: Mapping[str, Any] | None = None, /) -> Rows:
        """Executes a statement."""


def make_executor(connection: EngineConnection) -> Executor:
    """Executes on the driver's connection below one of SQLAlchemy's."""
    driver = cast("Any", connection.connection).driver_connection
    return (_Awaited if isinstance(driver, psycopg.AsyncConnection) else _Direct)(driver)


class _Direct:
    def __init__(self, connection: psycopg.Connection[Row]) -> None:
        self._connection = connection

    def execute(self, query: bytes, params: Mapping[str, Any] | None = None, /) -> Rows:
        # Not with the connection's row factory, which a handler may have changed.
        return self._connection.cursor(row_factory=tuple_row).execute(query, params)


class _Awaited:
    """An asyncio connection, in the greenlet that SQLAlchemy runs its synchronous core in."""

    def __init__(self, connection: psycopg.AsyncConnection[Row]) -> None:
        self._connection = connection

    def execute(self, query: bytes, params: Mapping[str, Any] | None = None, /) -> Rows:
        cursor = self._connection.cursor(row_factory=tuple_row)
        await_only(cursor.execute(query, params))
        return _Fetched(
            cursor.rowcount, await_only(cursor.fetchall()) if cursor.description else []
        )


class _Fetched:
    def __init__(self, rowcount: int, rows: list[Row]) -> None:
        self.rowcount, self._rows = rowcount, iter(rows)

    def fetchone(self) -> Row | None:
        return next(self._rows, None)

    def fetchall(self) -> list[Row]:
        return list(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return self._rows
