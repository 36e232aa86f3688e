"""The implementation of ``penstock.reconciling.Comparer`` without Spark: Postgres compares.

The canonical rows are copied from their snapshot into a temporary table of a transaction in the state's snapshot, and joined
with the state there.  Numbers and truth values are compared as such.  Anything else is compared by its text: some types have
no equality (``json``, ``point``), and that of others is coarser than their text (``citext``, ``box``, ``interval``).
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg import IsolationLevel, sql
from psycopg.postgres import types

from penstock.database.connections import Connection, TableConnection, connect_postgres
from penstock.database.driver_errors import first_line, postgres_errors
from penstock.database.query_text import subquery
from penstock.database.statements import quote, quote_literal
from penstock.database.transactions import FIX_FORMATS, HANDLER_TIMEOUT_S
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import DeclarationError, InvalidSetting, Unknown
from penstock.reconciling.comparison import (
    DIFFERENCES_KEPT,
    SAMPLES,
    Difference,
    DifferenceKind,
    StateComparison,
    canonical_query,
    check_keys,
    check_names,
    choose_columns,
)
from penstock.reconciling.cut import import_snapshot
from penstock.reconciling.state_repair import CanonicalRows


class InlineComparer:
    """Compares in Postgres, which needs temporary space for the canonical rows, and for sorting both sides."""

    engine = "inline"

    def __init__(self, database_url: str, report: str | None = None, *, with_rows: bool = False) -> None:
        """Sets up; a ``report`` is a directory, whose name ends with ``.csv``, for the differences of each reconciliation.

        ``with_rows`` gives the rows of both sides as well: in the report all, in the comparison ``SAMPLES``.
        """
        if report is not None and not report.endswith(".csv"):
            raise InvalidSetting(
                f"--report {report}: without Spark a report is CSV; end its name with .csv, or take --engine spark"
            )
        self._database_url, self._report, self._with_rows = database_url, report, with_rows

    def compare(
        self, spec: ReconciliationSpec, canonical: str, state: str, among: Sequence[str] | None = None
    ) -> StateComparison:
        """Compares every key of both sides.

        Raises ``DeclarationError``, ``Unknown``, ``SnapshotLost``, ``PrivilegeMissing`` if the role may not create temporary
        tables, or ``ServerUnavailable``.
        """
        has_rows = self._with_rows or among is not None
        with self._in_snapshot(state, read_only=False) as there:
            with self._in_snapshot(canonical) as here:
                join = _describe_join(spec, here, there)
                there.execute(join.create.encode())
                compared = _copy(here, join.select(0, among), there, "penstock_expected")
            there.execute(b"ANALYZE pg_temp.penstock_expected")
            there.execute(join.compare(among, with_rows=has_rows).encode())
            found = _read_counts(there, spec, join.columns, compared)
            differences = self._read_differences(there, spec, join, is_repair=among is not None)
        return replace(found, differences=differences)

    def rows(self, spec: ReconciliationSpec, canonical: str) -> CanonicalRows:
        """The canonical rows; they are read as they are consumed.  Raises as ``compare``."""
        source = subquery(canonical_query(spec))
        with self._in_snapshot(canonical) as connection:
            there = _read_types(connection, source)
        columns = _choose_columns(spec, there)
        values = {name: (_as_comparable(quote(name), there[name]), there[name]) for name in (*spec.key, *columns)}

        def each() -> Iterator[str]:
            with self._in_snapshot(canonical) as connection:
                for (row,) in _stream(connection, f"SELECT {_as_json(values)} FROM {source}", ["text"]):
                    yield row

        return CanonicalRows(columns, each())

    @contextmanager
    def _in_snapshot(self, snapshot: str, *, read_only: bool = True) -> Iterator[Connection]:
        """A connection that sees the database as the snapshot does, until the block ends."""
        url = self._database_url
        with connect_postgres(url, application="reconcile", prepare=False, kind=TableConnection) as connection:
            connection.longest_silence_s = HANDLER_TIMEOUT_S  # a sort may take long
            connection.isolation_level, connection.read_only = IsolationLevel.REPEATABLE_READ, read_only
            with postgres_errors("comparing in a snapshot"), connection.transaction():
                import_snapshot(connection, snapshot)
                connection.execute(FIX_FORMATS)  # as in the transaction that repairs
                yield connection

    def _read_differences(
        self, connection: Connection, spec: ReconciliationSpec, join: "_Join", *, is_repair: bool
    ) -> list[Difference]:
        """The first differences, in the order of their keys; all of them go into the report."""
        rows_kept = DIFFERENCES_KEPT if is_repair else SAMPLES
        kept: list[Difference] = []
        with self._open_report(spec.name, is_repair=is_repair) as write:
            for key, kind, columns, *rows in _stream(
                connection, join.differing, ["text", "text", "text[]", "text", "text"]
            ):
                difference = Difference(key, DifferenceKind(kind), tuple(columns), *rows)
                if write is not None:
                    write(difference)
                elif len(kept) == DIFFERENCES_KEPT:
                    break
                if len(kept) < DIFFERENCES_KEPT:
                    kept.append(difference if len(kept) < rows_kept else replace(difference, expected=None, found=None))
        return kept

    @contextmanager
    def _open_report(self, name: str, *, is_repair: bool) -> Iterator[Callable[[Difference], object] | None]:
        """Yields what writes a line into the file of a reconciliation; None without a report."""
        if self._report is None or is_repair:
            yield None
            return
        directory = Path(self._report)
        directory.mkdir(parents=True, exist_ok=True)
        fields = ("key", "kind", "columns", *(("expected", "found") if self._with_rows else ()))
        with (directory / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fields, extrasaction="ignore")
            writer.writeheader()
            yield lambda each: writer.writerow({**asdict(each), "columns": ", ".join(each.columns)})


class _SqlType(NamedTuple):
    """A type of Postgres, without length, precision or scale."""

    oid: int
    name: str

    @property
    def is_native(self) -> bool:
        """True if values are compared as such; JSON has them, too."""
        return self.oid in _NATIVE


_FLOAT4, _FLOAT8 = types["float4"].oid, types["float8"].oid
_NUMBERS = {_FLOAT4, _FLOAT8, *(types[name].oid for name in ("int2", "int4", "int8", "numeric"))}
_NATIVE = {*_NUMBERS, types["bool"].oid}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of both sides, its name in the join, and its type in the canonical rows and in the state.

    ``common`` is the type in which it is compared: the canonical one, unless both are numbers.
    """

    name: str
    alias: str
    own: tuple[_SqlType, _SqlType]
    common: _SqlType

    def value(self, side: int) -> str:
        return _as_comparable(_cast(self.name, self.own[side], self.common), self.common)


@dataclass(frozen=True)
class _Join:
    """The SQL of one comparison."""

    spec: ReconciliationSpec
    source: str
    table: str
    keys: Sequence[_Column]
    values: Sequence[_Column]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are compared."""
        return tuple(column.name for column in self.values)

    @property
    def create(self) -> str:
        """Creates the table of the canonical rows."""
        typed = (
            f"{each.alias} {each.common.name if each.common.is_native else _TEXT}"
            for each in (*self.keys, *self.values)
        )
        return f"CREATE TEMPORARY TABLE penstock_expected ({', '.join(typed)}) ON COMMIT DROP"

    def select(self, side: int, among: Sequence[str] | None) -> str:
        """The canonical rows, or those of the state."""
        compared = (f"{each.value(side)} AS {each.alias}" for each in (*self.keys, *self.values))
        return f"SELECT {', '.join(compared)} FROM {(self.source, self.table)[side]} {self._where(side, among)}"

    def compare(self, among: Sequence[str] | None, *, with_rows: bool) -> str:
        """Creates the table of the keys that differ, are NULL (their kind is), or are twice in the canonical rows."""
        keys = [key.alias for key in self.keys]
        joined = ", ".join(
            [
                *(f"coalesce(e.{key}, f.{key}) AS {key}" for key in keys),
                *(f"e.{each.alias} AS e{each.alias}, f.{each.alias} AS f{each.alias}" for each in self.values),
            ]
        )
        differs = {each.name: self._differs(each) for each in self.values}
        named = ", ".join(
            f"CASE WHEN {condition} THEN {quote_literal(name)} END" for name, condition in differs.items()
        )
        is_null = " OR ".join(f"{key} IS NULL" for key in keys) or "false"
        rows = ", ".join(
            f"CASE WHEN {side}_copies > 0 THEN {self._row(side[0])} END AS {side}" if with_rows else f"NULL AS {side}"
            for side in ("expected", "found")
        )
        return f"""
            CREATE TEMPORARY TABLE penstock_differing ON COMMIT DROP AS
            SELECT {", ".join([*keys, ""])} coalesce(expected_copies, found_copies) AS copies,
                   CASE WHEN {is_null} THEN NULL WHEN expected_copies > 1 THEN 'twice' WHEN found_copies IS NULL THEN 'missing'
                        WHEN expected_copies IS NULL THEN 'surplus' WHEN found_copies > 1 THEN 'doubled' ELSE 'different' END AS kind,
                   {_as_json({key.name: (key.alias, key.common) for key in self.keys})} AS key,
                   CASE WHEN expected_copies = 1 AND found_copies = 1
                        THEN array_remove(ARRAY[{named}]::text[], NULL) ELSE '{{}}' END AS columns,
                   {rows}
            FROM (
                SELECT {", ".join(filter(None, [joined, "e.copies AS expected_copies", "f.copies AS found_copies"]))}
                FROM {self._once("pg_temp.penstock_expected")} e
                FULL JOIN {self._once(f"({self.select(1, among)})")} f
                ON {" AND ".join(f"e.{key} = f.{key}" for key in keys) or "true"}
            ) joined
            WHERE {" OR ".join(["expected_copies IS DISTINCT FROM 1", "found_copies IS DISTINCT FROM 1", *differs.values()])}
        """

    @property
    def differing(self) -> str:
        """Reads that table."""
        order = ", ".join(key.alias for key in self.keys) or "1"
        return f"SELECT key, kind, columns, expected, found FROM pg_temp.penstock_differing ORDER BY {order}"

    def _once(self, source: str) -> str:
        """One row of each key, and the number of its rows."""
        by = ", ".join(key.alias for key in self.keys)
        window = f"(PARTITION BY {by})" if by else "()"
        counted = (
            f"SELECT *, count(*) OVER w AS copies, row_number() OVER w AS place FROM {source} s WINDOW w AS {window}"
        )
        return f"(SELECT * FROM ({counted}) t WHERE place = 1)"

    def _differs(self, column: _Column) -> str:
        """The condition that the values of a column differ, by more than its tolerance."""
        one, other = f"e{column.alias}", f"f{column.alias}"
        tolerance = self.spec.tolerance.get(column.name)
        if tolerance is None:
            return f"{one} IS DISTINCT FROM {other}"
        # Through their text, because a cast of a float rounds it to 15 digits.
        apart = f"abs(CAST(CAST({one} AS text) AS numeric) - CAST(CAST({other} AS text) AS numeric))"
        return f"({one} IS DISTINCT FROM {other} AND ({apart} <= CAST('{tolerance}' AS numeric)) IS NOT TRUE)"

    def _row(self, side: str) -> str:
        keys = {key.name: (key.alias, key.common) for key in self.keys}
        return _as_json(keys | {each.name: (f"{side}{each.alias}", each.common) for each in self.values})

    def _where(self, side: int, among: Sequence[str] | None) -> str:
        """The condition for the rows of some keys.

        Postgres can push the condition on a single column below a GROUP BY, and answer it from an index.
        """
        if among is None or not self.keys:
            return ""
        wanted = [json.loads(each, parse_float=str, parse_int=str) for each in among]
        lists = {key: _text_array(each[key.name] for each in wanted) for key in self.keys}
        casts = {key: _cast(key.name, key.own[side], key.common) for key in self.keys}
        conditions = [
            f"{casts[key]} = ANY (CAST({lists[key]} AS {key.common.name}[]))"
            for key in self.keys
            if not key.common.name.endswith("[]")
        ]
        typed = ", ".join(f"CAST(w.{key.alias} AS {key.common.name})" for key in self.keys)
        names = ", ".join(key.alias for key in self.keys)
        if len(conditions) != 1 or len(self.keys) != 1:
            conditions.append(
                f"({', '.join(casts.values())}) IN (SELECT {typed} FROM unnest({', '.join(lists.values())}) AS w ({names}))"
            )
        return f"WHERE {' AND '.join(conditions)}"


_TEXT = 'text COLLATE "C"'


def _describe_join(spec: ReconciliationSpec, here: Connection, there: Connection) -> _Join:
    """Finds the columns of both sides."""
    source, table = subquery(canonical_query(spec)), quote(spec.schema, spec.table)
    expected = _read_types(here, source)
    columns = _choose_columns(spec, expected)
    found = _read_types(there, table, (*spec.key, *columns))

    def pair(name: str, alias: str) -> _Column:
        own = expected[name], found[name]
        return _Column(name, alias, own, _choose_common(*own))

    return _Join(
        spec,
        source,
        table,
        [pair(name, f"k{number}") for number, name in enumerate(spec.key)],
        [pair(name, f"v{number}") for number, name in enumerate(columns)],
    )


def _choose_columns(spec: ReconciliationSpec, there: Mapping[str, _SqlType]) -> tuple[str, ...]:
    columns = choose_columns(spec, there)
    for column in spec.tolerance:
        if there[column].oid not in _NUMBERS:
            raise DeclarationError(
                f"reconciliation {spec.name}: tolerance is for numbers; {column} is {there[column].name}"
            )
    return columns


def _choose_common(expected: _SqlType, found: _SqlType) -> _SqlType:
    """The type in which the values of two types are compared."""
    oids = {expected.oid, found.oid}
    if len(oids) == 1 or not oids <= _NUMBERS:
        return expected
    name = "float8" if oids & {_FLOAT4, _FLOAT8} else "numeric"
    return _SqlType(types[name].oid, name)


def _read_types(connection: Connection, source: str, columns: Sequence[str] = ()) -> dict[str, _SqlType]:
    """The types of the columns of a query or table, or of some of them."""
    names = ", ".join(map(quote, columns)) or "*"
    try:
        found = connection.execute(f"SELECT {names} FROM {source} LIMIT 0".encode()).description
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        raise Unknown(f"reconcile: {first_line(error)}") from error
    check_names([column.name for column in found or ()])
    oids = {column.name: column.type_code for column in found or ()}
    named: dict[int, str] = dict(
        connection.execute(
            "SELECT t, pg_catalog.format_type(t, -1) FROM unnest(%s::oid[]) AS t", ([*oids.values()],)
        ).fetchall()
    )
    return {column: _SqlType(oid, named[oid]) for column, oid in oids.items()}


def _cast(column: str, own: _SqlType, common: _SqlType) -> str:
    """A column in another type; a float4 through its text, which is the number that was meant."""
    if own.oid == common.oid:
        return quote(column)
    value = f"CAST({quote(column)} AS text)" if own.oid == _FLOAT4 else quote(column)
    return f"CAST({value} AS {common.name})"


def _as_comparable(value: str, common: _SqlType) -> str:
    """The expression that is compared and ordered: text by its bytes, whatever the database's collation."""
    return value if common.is_native else f'CAST({value} AS text) COLLATE "C"'


def _as_json(values: Mapping[str, tuple[str, _SqlType]]) -> str:
    """Columns as JSON that Postgres can read as a row: numbers and truth values as such, and anything else as text.

    The zero below zero of a float is text, because JSON in Postgres has numbers of type numeric alone.
    """
    fields = (
        f"CASE CAST({value} AS text) WHEN '-0' THEN to_json(text '-0') ELSE to_json({value}) END AS {quote(name)}"
        if type_.oid in {_FLOAT4, _FLOAT8}
        else f"{value} AS {quote(name)}"
        for name, (value, type_) in values.items()
    )
    return f"(SELECT row_to_json(r)::text FROM (SELECT {', '.join(fields)}) r)"


def _text_array(values: Iterable[object]) -> str:
    texts = [value if isinstance(value, str) else str(value).lower() for value in values]
    return sql.SQL("{}::text[]").format(texts).as_string(None)


def _copy(source: Connection, query: str, target: Connection, table: str) -> int:
    """Copies the rows of a query into a temporary table of another connection; returns their number."""
    with source.cursor().copy(f"COPY ({query}) TO STDOUT".encode()) as out, target.cursor() as cursor:
        with cursor.copy(f"COPY pg_temp.{table} FROM STDIN".encode()) as into:
            for data in out:
                into.write(data)
        return cursor.rowcount


def _stream(connection: Connection, query: str, of_types: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The rows of a query, one after the other."""
    with connection.cursor().copy(f"COPY ({query}) TO STDOUT".encode()) as copy:
        copy.set_types(of_types)
        yield from copy.rows()


def _read_counts(
    connection: Connection, spec: ReconciliationSpec, columns: tuple[str, ...], copied: int
) -> StateComparison:
    """Number of differing keys, by kind and by column."""
    by_kind = "SELECT kind, count(*), sum(copies)::bigint FROM pg_temp.penstock_differing GROUP BY kind"
    found = {kind: (keys, rows) for kind, keys, rows in connection.execute(by_kind)}
    check_keys(spec, without_key=found.get(None, (0, 0))[1], twice=found.get("twice", (0, 0))[0])
    by_name = "SELECT name, count(*) FROM pg_temp.penstock_differing, unnest(columns) AS name GROUP BY name"
    named: dict[str, int] = dict(connection.execute(by_name).fetchall())
    counts = {kind: found[kind][0] for kind in DifferenceKind if kind in found}
    return StateComparison(
        copied + counts.get(DifferenceKind.SURPLUS, 0),
        counts,
        [],
        columns,
        {column: named[column] for column in columns if column in named},
    )
