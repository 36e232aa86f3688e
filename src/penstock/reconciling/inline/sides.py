"""Reads one side of a comparison in the order of its keys, in a snapshot, a few thousand rows at a time.

Values are cast to text by Postgres.  A column of the state has the type of the canonical column, unless both are numbers.
Keys that are integers or numerics are ordered as numbers, others as text in the collation C, which is the order of Python's
strings, whatever the database's collation.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import IsolationLevel, sql

from penstock.database.connections import Connection, TableConnection, connect_postgres
from penstock.database.errors import first_line, postgres_errors
from penstock.database.statements import quote
from penstock.database.transactions import FIX_FORMATS, HANDLER_TIMEOUT_S
from penstock.errors import Unknown
from penstock.reconciling.cut import import_snapshot
from penstock.reconciling.inline.values import NUMBERS, ORDERED, Value

ROWS_A_FETCH = 5_000
CHARACTERS_A_FETCH = 8 * 1024 * 1024
"""Most characters of one fetch, as estimated from the rows of the last one."""
_FIRST_FETCH, _SAMPLE = 100, 50

Key = tuple[Value, ...]


@dataclass(frozen=True)
class Side:
    """A query or table, and the types of its columns.

    Attributes:
        source: What stands after FROM.
        oids: The type of each column.
        names: The SQL name of each type.
    """

    source: str
    oids: Mapping[str, int]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one key.

    Attributes:
        key: The values of its columns.
        values: The values of the compared columns, of one of the rows.
        count: Number of rows.
    """

    key: Key
    values: tuple[Value, ...]
    count: int


@contextmanager
def in_snapshot(database_url: str, snapshot: str) -> Iterator[Connection]:
    """A connection that sees the database as the snapshot does, until the block ends.

    Raises:
        SnapshotLost: The transaction that held the snapshot has ended.
        ServerUnavailable: Postgres does not answer.
    """
    with connect_postgres(database_url, application="reconcile", prepare=False, kind=TableConnection) as connection:
        connection.longest_silence_s = HANDLER_TIMEOUT_S  # a sort may take long
        connection.isolation_level, connection.read_only = IsolationLevel.REPEATABLE_READ, True
        with postgres_errors("reading in a snapshot"), connection.transaction():
            import_snapshot(connection, snapshot)
            connection.execute(FIX_FORMATS)  # as in the transaction that repairs
            connection.execute("SET LOCAL cursor_tuple_fraction = 1")  # every row is fetched
            yield connection


def describe_side(connection: Connection, source: str, columns: Sequence[str] | None) -> Side:
    """The columns of a query or table, or some of them.

    Raises:
        Unknown: There is no such table or column.
    """
    names = "*" if columns is None else ", ".join(map(quote, columns))
    try:
        found = connection.execute(f"SELECT {names} FROM {source} LIMIT 0".encode()).description
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        raise Unknown(f"reconcile: {first_line(error)}") from error
    oids = {column.name: column.type_code for column in found or ()}
    types = connection.execute(
        "SELECT t, pg_catalog.format_type(t, -1) FROM unnest(%s::oid[]) AS t", ([*oids.values()],)
    ).fetchall()
    by_oid: dict[int, str] = dict(types)
    return Side(source, oids, {column: by_oid[oid] for column, oid in oids.items()})


def read_groups(
    connection: Connection,
    side: Side,
    like: Side,
    key: Sequence[str],
    columns: Sequence[str],
    among: Sequence[str] | None,
) -> Iterator[Group]:
    """The rows of each key, in the order of the keys; keys with NULL come last.

    Args:
        connection: In the side's snapshot.
        side: What to read.
        like: The canonical side, whose types are taken.
        key: The columns of the key.
        columns: The columns to compare.
        among: Read only these keys, each as JSON.
    """
    # Renamed: a bare name in ORDER BY is that of an output column, which is text.
    keys = [f'{_as_key(side, like, column)} AS "penstock key {number}"' for number, column in enumerate(key)]
    values = [_as_text(side, like, column) for column in columns]
    order = ", ".join(_as_order(side, like, column) for column in key)
    query = f"SELECT {', '.join([*keys, *values]) or 'NULL'} FROM {side.source} {_where(side, like, key, among)}" + (
        f" ORDER BY {order}" if order else ""
    )
    return _group(_stream(connection, query), len(key), len(columns))


def read_rows(connection: Connection, side: Side, columns: Sequence[str]) -> Iterator[Key]:
    """All rows, in no order."""
    values = ", ".join(_as_text(side, side, column) for column in columns)
    return _stream(connection, f"SELECT {values} FROM {side.source}")


def _stream(connection: Connection, query: str) -> Iterator[Key]:
    with connection.cursor(name="penstock_rows") as cursor:
        cursor.execute(query.encode())
        count = _FIRST_FETCH
        while rows := cursor.fetchmany(count):
            yield from rows
            sample = rows[:: 1 + len(rows) // _SAMPLE]
            widest = max(sum(len(value or "") for value in row) for row in sample)
            count = max(1, min(ROWS_A_FETCH, CHARACTERS_A_FETCH // max(1, widest)))


def _group(rows: Iterable[Key], keys: int, columns: int) -> Iterator[Group]:
    """Neighbours with the same key become one group."""
    group: Group | None = None
    for row in rows:
        key, values = row[:keys], row[keys : keys + columns]
        if group is not None and group.key == key:
            group = Group(key, group.values, group.count + 1)
            continue
        if group is not None:
            yield group
        group = Group(key, values, 1)
    if group is not None:
        yield group


def _as_text(side: Side, like: Side, column: str) -> str:
    return f"{_cast(side, like, column)}::text"


def _as_key(side: Side, like: Side, column: str) -> str:
    """The text of a key's column; that of a numeric does not depend on its trailing zeros."""
    value = _in_type(side, like, column)
    return f"trim_scale({value})::text" if like.names[column] == "numeric" else f"{value}::text"


def _as_order(side: Side, like: Side, column: str) -> str:
    """What a key's column is ordered by: as ``make_order`` orders it."""
    if like.oids[column] in ORDERED:
        return _in_type(side, like, column)
    return f'({_as_key(side, like, column)}) COLLATE "C"'


def _cast(side: Side, like: Side, column: str) -> str:
    are_numbers = {side.oids[column], like.oids[column]} <= NUMBERS
    return quote(column) if are_numbers else _in_type(side, like, column)


def _in_type(side: Side, like: Side, column: str) -> str:
    """A column in the canonical type."""
    if side.oids[column] == like.oids[column]:
        return quote(column)
    return f"CAST({quote(column)} AS {like.names[column]})"


def _where(side: Side, like: Side, key: Sequence[str], among: Sequence[str] | None) -> str:
    """The condition for the rows of some keys.

    Postgres can push the condition on a single column below a GROUP BY, and answer it from an index.
    """
    if among is None or not key:
        return ""
    wanted = [json.loads(each, parse_float=str, parse_int=str) for each in among]
    values = {column: _text_array(each[column] for each in wanted) for column in key}
    conditions = [
        f"{_in_type(side, like, column)} = ANY (CAST({values[column]} AS {like.names[column]}[]))"
        for column in key
        if not like.names[column].endswith("[]")
    ]
    if len(conditions) != 1 or len(key) != 1:
        conditions.append(_is_among(side, like, values))
    return f"WHERE {' AND '.join(conditions)}"


def _is_among(side: Side, like: Side, values: Mapping[str, str]) -> str:
    """The condition that the columns together are one of the keys."""
    columns = ", ".join(_in_type(side, like, column) for column in values)
    typed = ", ".join(f"CAST(w.k{number} AS {like.names[column]})" for number, column in enumerate(values))
    names = ", ".join(f"k{number}" for number in range(len(values)))
    lists = ", ".join(values.values())
    return f"({columns}) IN (SELECT {typed} FROM unnest({lists}) AS w ({names}))"


def _text_array(values: Iterable[object]) -> str:
    return sql.SQL("{}::text[]").format(list(map(_plain, values))).as_string(None)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else str(value).lower()
