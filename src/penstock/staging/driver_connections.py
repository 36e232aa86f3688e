"""Connections without a session: SQLAlchemy's, psycopg's and Django's.

And queries through those or a session.  Rows go through the connection's own transaction.

Psycopg and Django are recognised through ``sys.modules``: a process that has such a connection has
imported them, and one that has none need not.
"""

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session, scoped_session

from penstock.database.statements import quote
from penstock.database.tables import staged_records
from penstock.errors import NotAttached, StagingError
from penstock.staging.rows import (
    AUTOCOMMIT,
    Insert,
    Rows,
    insert_rows,
    insert_steps,
    known_at,
    make_refusal,
    run_steps,
)

_PARAMETER = "%({})s"


class DriverConnection(Protocol):
    """A connection of psycopg or of Django."""

    def cursor(self) -> Any:
        """Returns a cursor."""


def is_async_driver(connection: object) -> bool:
    """Returns whether this is an ``AsyncConnection`` of psycopg."""
    return _is_instance(connection, "psycopg", "AsyncConnection")


def insert_directly(connection: Any, insert: Insert, caller: str) -> list[int]:
    """Inserts the rows in order, in the connection's transaction.

    Returns their ids if ``wants_ids``.
    """
    if isinstance(connection, Connection):
        return insert_rows(connection, insert)
    errors: Any
    if _is_instance(connection, "psycopg", "Connection"):
        _refuse_psycopg_autocommit(connection)
        errors, info = sys.modules["psycopg"].Error, connection.info
        checked_until = known_at(info.host, info.port, info.dbname)
    elif _is_django(connection):
        _check_django(connection)
        errors, settings = sys.modules["django.db.utils"].Error, connection.settings_dict
        checked_until = known_at(settings.get("HOST"), settings.get("PORT"), settings.get("NAME"))
    else:
        raise NotAttached(
            f"{caller}() takes a Session, or a Connection of SQLAlchemy, psycopg or Django, not "
            f"{type(connection).__name__}; with an AsyncSession or AsyncConnection: await "
            f"{caller}_async(…)"
        )
    try:
        with _open_cursor(connection) as cursor:
            return run_steps(
                insert_steps(insert, checked_until, _PARAMETER), partial(_execute, cursor)
            )
    except errors as error:
        if (refusal := make_refusal(error)) is None:
            raise
    raise refusal  # outside ``except``: the driver's error may quote the payload


def read_directly(connection: Any, sql: str, values: dict[str, Any] | None = None) -> Rows:
    """Runs a query on a connection of psycopg or Django; returns its rows."""
    if not (_is_instance(connection, "psycopg", "Connection") or _is_django(connection)):
        raise TypeError(
            "takes a Session, or a Connection of SQLAlchemy, psycopg or Django, not "
            f"{type(connection).__name__}; for an AsyncSession or AsyncConnection: await "
            "session.run_sync(staged)"
        )
    with _open_cursor(connection) as cursor:
        return _execute(cursor, sql, values)


def _open_cursor(connection: Any) -> Any:
    """Opens a standard cursor of Django or psycopg, whatever the connection's own are."""
    if _is_django(connection):
        return connection.cursor()
    psycopg = sys.modules["psycopg"]
    return psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)


def read_rows(target: Any, schema: str, query: str, values: dict[str, Any]) -> Rows:
    """Runs a query in the transaction of a session or connection.

    The query has ``{schema}`` and its values in braces.  Raises ``NotAttached`` for any other
    target, async ones among them.
    """
    if isinstance(target, Session | scoped_session):
        target = target.connection(bind_arguments={"clause": staged_records(schema)})
    if isinstance(target, Connection):
        return target.execute(text(_fill(query, schema, values, ":{}")), values).all()
    try:
        return read_directly(target, _fill(query, schema, values, _PARAMETER), values)
    except TypeError as error:
        raise NotAttached(str(error)) from error


def _fill(query: str, schema: str, names: Iterable[str], form: str) -> str:
    return query.format(schema=quote(schema), **{name: form.format(name) for name in names})


async def read_by_async_psycopg(
    connection: Any, schema: str, query: str, values: dict[str, Any]
) -> Rows:
    """Runs a query like ``read_rows``, on psycopg's ``AsyncConnection``."""
    psycopg = sys.modules["psycopg"]
    async with psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
        await cursor.execute(_fill(query, schema, values, _PARAMETER), values)
        rows: Rows = await cursor.fetchall()
        return rows


async def insert_by_async_psycopg(connection: Any, insert: Insert) -> list[int]:
    """Inserts the rows through psycopg's ``AsyncConnection``: see ``insert_directly``."""
    _refuse_psycopg_autocommit(connection)
    psycopg, info = sys.modules["psycopg"], connection.info
    steps = insert_steps(insert, known_at(info.host, info.port, info.dbname), _PARAMETER)
    refusal = None
    try:
        async with psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
            question = next(steps)
            while True:
                await cursor.execute(*question)
                question = steps.send(await cursor.fetchall() if _has_rows(question[0]) else ())
    except StopIteration as end:
        ids: list[int] = end.value
        return ids
    except psycopg.Error as error:
        if (refusal := make_refusal(error)) is None:
            raise
    assert refusal is not None
    raise refusal  # the same


def _execute(cursor: Any, sql: str, values: dict[str, Any] | None) -> Rows:
    cursor.execute(sql, values)
    rows: Rows = cursor.fetchall() if _has_rows(sql) else ()
    return rows


def _has_rows(sql: str) -> bool:
    """True for a statement that returns rows.

    In psycopg's pipeline mode the cursor cannot tell yet.
    """
    words = sql.split()
    return words[0] == "SELECT" or "RETURNING" in words


def _refuse_psycopg_autocommit(connection: Any) -> None:
    """Refuses autocommit mode, unless a statement or ``connection.transaction()`` began one.

    The latter is counted by psycopg; in pipeline mode, the server's state does not show it yet.
    """
    is_begun = connection.info.transaction_status.name in {"INTRANS", "INERROR"}
    if connection.autocommit and not is_begun and not getattr(connection, "_num_transactions", 0):
        raise StagingError(f"{AUTOCOMMIT}; begin a transaction: with connection.transaction()")


def _check_django(connection: Any) -> None:
    if connection.vendor != "postgresql":
        raise NotAttached(
            f"the Django connection {connection.alias!r} is to {connection.vendor}; records are "
            "staged in the Postgres database of the changed tables: django.db.connections[alias]"
        )
    if not connection.in_atomic_block and connection.get_autocommit():
        raise StagingError(f"{AUTOCOMMIT}; begin a transaction: with transaction.atomic()")


def _is_django(connection: object) -> bool:
    return hasattr(connection, "in_atomic_block") and hasattr(connection, "vendor")


def _is_instance(connection: object, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(connection, cls)
