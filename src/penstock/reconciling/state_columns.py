"""The columns of a state's table, and the canonical values as they hold them.

A canonical value is compared, and written, as ``INSERT INTO state SELECT …`` would write it: cast
to the column's type, with its scale or precision.  Only a length is no part of the cast, which
would truncate: what is too long differs, and a repair refuses it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
from psycopg.postgres import types
from psycopg.rows import class_row

from penstock.database.connections import Connection
from penstock.database.driver_errors import first_line
from penstock.database.statements import quote, statements
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import Refused, Unknown
from penstock.reconciling.comparison import check_names
from penstock.records import DEFAULT_SCOPE

CATALOG = statements(DEFAULT_SCOPE.schema)
"""Statements about Postgres' catalog.

Those that name a table of ours are not to be taken from here.
"""

FLOAT4, FLOAT8 = types["float4"].oid, types["float8"].oid
_INTEGERS = {types[name].oid for name in ("int2", "int4", "int8")}
NUMBERS = {FLOAT4, FLOAT8, types["numeric"].oid, *_INTEGERS}
NATIVE = {*NUMBERS, types["bool"].oid}
_JSON, _JSONB = types["json"].oid, types["jsonb"].oid
_NAME = types["name"].oid  # which truncates


class SqlType(NamedTuple):
    """A type of Postgres, without length, precision or scale."""

    oid: int
    name: str
    category: str = ""  # of pg_type; empty if nobody asks for it

    @property
    def is_native(self) -> bool:
        """True if values are compared as such; JSON has them, too."""
        return self.oid in NATIVE


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A column of a state's table."""

    name: str
    limited: str  # its type, ``numeric(12,2)``; of a domain, the type below it
    unlimited: str  # the same without length, precision or scale
    oid: int
    is_text: bool
    is_sized: bool  # its type, or that of an array's elements, has a length
    is_generated: bool
    is_identity: bool  # GENERATED ALWAYS AS IDENTITY

    @property
    def type(self) -> SqlType:
        """Type for comparing: without the padding of a char in an array, which its text has."""
        if self.unlimited == "bpchar[]":
            return SqlType(types["text"].array_oid, "text[]")
        return SqlType(self.oid, self.unlimited)

    @property
    def is_json(self) -> bool:
        """True if it holds documents."""
        return self.oid in {_JSON, _JSONB}

    @property
    def is_integer(self) -> bool:
        """True if it holds whole numbers."""
        return self.oid in _INTEGERS

    @property
    def is_rounded(self) -> bool:
        """True if its type has a precision or a scale, which a cast applies."""
        return self.limited != self.unlimited and not self.is_sized

    def is_text_for(self, canonical: SqlType) -> bool:
        """True if it holds values of another type as text; one value may have several texts.

        They are compared in the other type.
        """
        if self.is_text and self.oid != _NAME:
            return canonical.category not in {"S", "P", "X"}
        return self.oid == _JSON and canonical.oid == _JSONB


def read_columns(connection: Connection, table: int) -> dict[str, StateColumn]:
    """Reads the columns of a table, by name.

    Names of types are for the connection's search_path.
    """
    with connection.cursor(row_factory=class_row(StateColumn)) as cursor:
        return {
            column.name: column
            for column in cursor.execute(CATALOG["state_columns"], {"table": table})
        }


def read_state_columns(
    connection: Connection, spec: ReconciliationSpec, names: Sequence[str]
) -> dict[str, StateColumn]:
    """Reads some columns of a state, which the connection's search_path finds."""
    read_result_types(connection, quote(spec.schema, spec.table), names)
    [(table,)] = connection.execute(
        CATALOG["find_table"], {"table": quote(spec.schema, spec.table)}
    ).fetchall()
    return read_columns(connection, table)


def read_result_types(
    connection: Connection, source: str, columns: Sequence[str] = ()
) -> dict[str, SqlType]:
    """Reads the types of the columns of a query or table, or of some of them."""
    names = ", ".join(map(quote, columns)) or "*"
    try:
        description = connection.execute(
            f"SELECT {names} FROM {source} LIMIT 0".encode()
        ).description
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        raise Unknown(f"reconcile: {first_line(error)}") from error
    check_names([column.name for column in description or ()])
    oids = {column.name: column.type_code for column in description or ()}
    rows = connection.execute(
        "SELECT oid::int8, pg_catalog.format_type(oid, -1), typcategory::text FROM "
        "pg_catalog.pg_type WHERE oid = ANY (%s::oid[])",
        ([*oids.values()],),
    )
    types = {oid: SqlType(oid, *fields) for oid, *fields in rows}
    return {column: types[oid] for column, oid in oids.items()}


def cast_values(
    connection: Connection, canonical: Mapping[str, SqlType], state: Mapping[str, StateColumn]
) -> dict[str, str]:
    """Renders an expression for each canonical column that casts it to the state's column."""
    return {
        name: _cast_value(connection, quote(name), sql_type, state[name])
        for name, sql_type in canonical.items()
    }


def _cast_value(connection: Connection, value: str, source: SqlType, column: StateColumn) -> str:
    if source.oid != column.oid:
        # A float through its text, which is the number that was meant.
        is_float = (
            source.oid in {FLOAT4, FLOAT8} and column.oid in NUMBERS and not column.is_integer
        )
        is_direct = not is_float and is_castable(
            connection, source, SqlType(column.oid, column.unlimited)
        )
        value = f"CAST({value if is_direct else f'CAST({value} AS text)'} AS {column.unlimited})"
    if column.oid != column.type.oid:
        value = f"CAST({value} AS {column.type.name})"
    return f"CAST({value} AS {column.limited})" if column.is_rounded else value


def is_castable(connection: Connection, source: SqlType, target: SqlType) -> bool:
    """True if Postgres casts one type to the other."""
    try:
        with connection.transaction():
            connection.execute(
                f"SELECT CAST(CAST(NULL AS {source.name}) AS {target.name})".encode()
            )
    except (psycopg.errors.CannotCoerce, psycopg.errors.FeatureNotSupported):
        return False
    return True


def refuse_unfit(
    connection: Connection,
    spec: ReconciliationSpec,
    source: str,
    casts: Mapping[str, str],
    state: Mapping[str, StateColumn],
) -> None:
    """Refuses the first column with a value that the state's type does not take.

    Returns if the query itself fails.
    """
    if not fails(connection, source, *map(quote, casts)):
        for name in (
            name for name, expression in casts.items() if fails(connection, source, expression)
        ):
            raise unfit(spec, state[name])


def fails(connection: Connection, source: str, *expressions: str) -> bool:
    """True if an expression cannot be computed for a row."""
    counted = ", ".join(f"count({expression})" for expression in expressions)
    try:
        with connection.transaction():
            connection.execute(f"SELECT {counted} FROM {source}".encode())
    except psycopg.DataError:
        return True
    return False


def unfit(spec: ReconciliationSpec, column: StateColumn) -> Refused:
    """Makes the error for a canonical value that a column cannot hold."""
    return Refused(
        f"column {column.name!r} of {spec.state}, {column.limited}, cannot hold a canonical "
        "value. Nothing was changed. Alter the column, or cast or shorten the value in the "
        f"canonical query of reconciliation {spec.name}"
    )


def require_columns(
    spec: ReconciliationSpec, columns: Iterable[str], available: Mapping[str, Any]
) -> None:
    """Checks that the state has some columns."""
    missing = [column for column in columns if column not in available]
    if missing:
        raise Unknown(
            f"reconciliation {spec.name}: {spec.state} has no column {missing[0]!r}; it has "
            f"{', '.join(available)}"
        )
