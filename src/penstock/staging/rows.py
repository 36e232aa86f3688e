"""Rows of ``staged_records``: checked one by one, inserted all in one statement.

The statement has one parameter, a JSON text of all rows, so it is the same for one row and for a thousand: compiled
once, prepared once.  The payload's text is made by our own check and goes in as it is; the application's own
``json_serializer`` has no part in it.  It needs the right to INSERT and no other: nothing is read back.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import DBAPIError

from penstock.declarations import Channel
from penstock.errors import StagingError
from penstock.staging.payload import headers_text, json_text, key_text, word

Row = str
"""A row as JSON: channel, shard, key, action, object, data, headers."""

MAX_STATEMENT_CHARACTERS = 16 * 1024 * 1024
"""More than this becomes a second statement: what the server has to hold in memory stays bounded."""

_quoted = json.JSONEncoder(ensure_ascii=False).encode

_WORDS_KEPT = 1000
_words: dict[str, str] = {}
"""Words that were checked, as JSON: an application has few, and each record has three."""

_TRANSACTION_CLASSES = ("08", "25", "40", "53", "55", "57")
"""Classes of SQLSTATE that are about the transaction or the server, and that applications know how to meet."""

_MENDS = {
    "42P01": "create Penstock's tables: penstock init",
    "3F000": "create Penstock's tables: penstock init",
    "42501": "the role needs USAGE on the schema and INSERT on staged_records",
}


def row(  # noqa: PLR0913, PLR0917  a row has this many columns
    channel: Channel,
    key: object,
    action: object,
    object: object,  # noqa: A002  the word of the record
    data: Any,
    headers: object = None,
    field: str = "",
) -> Row:
    """A checked row.

    Args:
        channel: Where the record goes.
        key: A str, int or UUID.
        action: What happened.
        object: What it happened to.
        data: The payload.
        headers: A dict, or None.
        field: What stands before the names of fields in errors, such as ``records[3].``.

    Raises:
        InvalidRecord: A field is not acceptable.
    """
    checked_key = key_text(key, f"{field}key")
    checked = [
        _word(channel.name, "channel"),
        str(channel.shard_of(checked_key)),
        _quoted(checked_key),
        _word(action, f"{field}action"),
        _word(object, f"{field}object"),
        json_text(data, f"{field}data", channel.max_bytes),
    ]
    if headers is not None:
        checked.append(headers_text(headers, f"{field}headers") or "null")
    return f"[{','.join(checked)}]"


def _word(value: object, field: str) -> str:
    known = _words.get(value) if type(value) is str else None
    if known is None:
        checked = word(value, field)
        known = _quoted(checked)
        if len(_words) < _WORDS_KEPT:
            _words[checked] = known
    return known


def insert(connection: Connection, schema: str, rows: Sequence[Row]) -> None:
    """Inserts the rows, in their order, in one statement (a further one for every 16 MB).

    Raises:
        StagingError: Postgres refuses them, or the connection has no transactions; the text holds no payload.
        sqlalchemy.exc.DBAPIError: The transaction or the connection has failed, in a way that can be tried again.
    """
    if _is_autocommit(connection):
        raise StagingError(
            "the connection is in AUTOCOMMIT: the change and its record would be two transactions, and one of them can "
            "be lost; use a connection or an engine with another isolation level"
        )
    for chunk in _chunks(rows):
        failure = _failure(connection, _statement(schema), f"[{','.join(chunk)}]")
        if failure is not None:
            # Raised here, outside of ``except``, so that the error with the parameters is not its context.
            raise failure


def _failure(connection: Connection, statement: TextClause, rows: str) -> Exception | None:
    """Runs the statement, and gives the error that the application should see."""
    try:
        connection.execute(statement, {"rows": rows})
    except DBAPIError as error:
        state = _sqlstate(error)
        if error.connection_invalidated or not state or state.startswith(_TRANSACTION_CLASSES):
            error.hide_parameters = True
            return error
        mend = _MENDS.get(state, "see the server's log")
        return StagingError(
            f"Postgres refused the staged records ({type(error.orig).__name__}, SQLSTATE {state}): {mend}"
        )
    return None


@cache
def _statement(schema: str) -> TextClause:
    """The INSERT.  ``jsonb`` keeps numbers exactly and ``WITH ORDINALITY`` the order, so ids are drawn in it."""
    return text(
        f"""
        INSERT INTO "{schema}".staged_records (channel, shard, key, action, object, data, headers)
        SELECT r.v ->> 0, (r.v ->> 1)::integer, r.v ->> 2, r.v ->> 3, r.v ->> 4, r.v -> 5, r.v -> 6
        FROM jsonb_array_elements(CAST(:rows AS jsonb)) WITH ORDINALITY AS r (v, n)
        ORDER BY r.n
    """.replace("::", r"\:\:")
    )


def _chunks(rows: Sequence[Row]) -> Iterator[Iterable[Row]]:
    start = size = 0
    for number, each in enumerate(rows):
        if size and size + len(each) > MAX_STATEMENT_CHARACTERS:
            yield rows[start:number]
            start, size = number, 0
        size += len(each)
    yield rows[start:]


def _is_autocommit(connection: Connection) -> bool:
    level = connection.get_execution_options().get("isolation_level")
    if level is None:  # what create_engine(isolation_level=…) says
        level = getattr(connection.dialect, "_on_connect_isolation_level", None)
    return level == "AUTOCOMMIT"


def _sqlstate(error: DBAPIError) -> str:
    """What psycopg and asyncpg call ``sqlstate``, and psycopg2 ``pgcode``."""
    for name in ("sqlstate", "pgcode"):
        state = getattr(error.orig, name, None)
        if isinstance(state, str):
            return state
    return ""
