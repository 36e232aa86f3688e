"""Connections without a session: SQLAlchemy's, psycopg's and Django's.  Rows go through the connection's own transaction.

Psycopg and Django are recognised through ``sys.modules``: a process that has such a connection has imported them, and one
that has none need not.
"""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from sqlalchemy import Connection

from penstock.errors import NotAttached, StagingError
from penstock.staging.rows import AUTOCOMMIT, Row, insert_rows, insert_sql, make_refusal, split_rows

_PARAMETER = "%(rows)s"


class DriverConnection(Protocol):
    """A connection of psycopg or of Django."""

    def cursor(self) -> Any:
        """Returns a cursor."""


def is_async_driver(connection: object) -> bool:
    """Returns whether this is an ``AsyncConnection`` of psycopg."""
    return _is_instance(connection, "psycopg", "AsyncConnection")


def insert_directly(connection: Any, schema: str, rows: Sequence[Row], caller: str) -> None:
    """Inserts the rows in order, in the connection's transaction.

    Args:
        connection: SQLAlchemy's, psycopg's or Django's.
        schema: The Penstock schema.
        rows: The rows.
        caller: The function that the application called, for errors.

    Raises:
        NotAttached: The connection is of another type, or of another database.
        StagingError: Postgres refused the rows, or the connection is in autocommit mode; the text holds no payload.
    """
    if isinstance(connection, Connection):
        insert_rows(connection, schema, rows)
    elif _is_instance(connection, "psycopg", "Connection"):
        _insert_by_psycopg(connection, schema, rows)
    elif hasattr(connection, "in_atomic_block") and hasattr(connection, "vendor"):
        _insert_by_django(connection, schema, rows)
    else:
        raise NotAttached(
            f"{caller}() takes a Session, or a Connection of SQLAlchemy, psycopg or Django, not "
            f"{type(connection).__name__}; with an AsyncSession or AsyncConnection: await {caller}_async(…)"
        )


async def insert_by_async_psycopg(connection: Any, schema: str, rows: Sequence[Row]) -> None:
    """Inserts the rows through psycopg's ``AsyncConnection``: see ``insert_directly``."""
    _refuse_psycopg_autocommit(connection)
    psycopg, refusal = sys.modules["psycopg"], None
    try:
        async with psycopg.AsyncCursor(connection) as cursor:
            for chunk in split_rows(rows):
                await cursor.execute(insert_sql(schema, _PARAMETER), {"rows": chunk})
    except psycopg.Error as error:
        if (refusal := make_refusal(error)) is None:
            raise
    if refusal is not None:
        raise refusal  # outside ``except``: the driver's error may quote the payload


def _insert_by_psycopg(connection: Any, schema: str, rows: Sequence[Row]) -> None:
    _refuse_psycopg_autocommit(connection)
    psycopg, refusal = sys.modules["psycopg"], None
    try:
        with psycopg.Cursor(connection) as cursor:  # whatever the connection's own cursors are
            for chunk in split_rows(rows):
                cursor.execute(insert_sql(schema, _PARAMETER), {"rows": chunk})
    except psycopg.Error as error:
        if (refusal := make_refusal(error)) is None:
            raise
    if refusal is not None:
        raise refusal


def _refuse_psycopg_autocommit(connection: Any) -> None:
    """Refuses autocommit mode, unless a transaction was begun by statement or by ``connection.transaction()``.

    The latter is counted by psycopg; in pipeline mode, the server's state does not show it yet.
    """
    is_begun = connection.info.transaction_status.name in {"INTRANS", "INERROR"}
    if connection.autocommit and not is_begun and not getattr(connection, "_num_transactions", 0):
        raise StagingError(f"{AUTOCOMMIT}; begin a transaction: with connection.transaction()")


def _insert_by_django(connection: Any, schema: str, rows: Sequence[Row]) -> None:
    if connection.vendor != "postgresql":
        raise NotAttached(
            f"the Django connection {connection.alias!r} is of {connection.vendor}; records are staged in the Postgres "
            "that holds the changed tables: django.db.connections[alias]"
        )
    if not connection.in_atomic_block and connection.get_autocommit():
        raise StagingError(f"{AUTOCOMMIT}; begin a transaction: with transaction.atomic()")
    refusal = None
    try:
        with connection.cursor() as cursor:
            for chunk in split_rows(rows):
                cursor.execute(insert_sql(schema, _PARAMETER), {"rows": chunk})
    except sys.modules["django.db.utils"].Error as error:
        if (refusal := make_refusal(error.__cause__)) is None:
            raise
    if refusal is not None:
        raise refusal


def _is_instance(connection: object, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(connection, cls)
