"""The implementation of ``penstock.reconciling.Comparer`` without Spark: Postgres compares.

The canonical rows are copied from their snapshot into a temporary table of a transaction in the
state's snapshot, as the state's columns would hold them, and joined with the state there.  Numbers
and truth values are compared as such.  Anything else is compared by its text: some types have no
equality (``json``, ``point``), and that of others is coarser than their text (``citext``, ``box``,
``interval``).
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
from psycopg import IsolationLevel, sql
from psycopg.postgres import types

from penstock.database.connections import Connection, TableConnection, connect_postgres
from penstock.database.driver_errors import first_line, postgres_errors
from penstock.database.query_text import subquery
from penstock.database.statements import quote, quote_literal
from penstock.database.transactions import FIX_FORMATS, HANDLER_TIMEOUT_S
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import DeclarationError, InvalidSetting
from penstock.reconciling.comparison import (
    DIFFERENCES_KEPT,
    SAMPLES,
    Difference,
    DifferenceKind,
    StateComparison,
    canonical_query,
    check_keys,
    choose_columns,
)
from penstock.reconciling.cut import import_snapshot
from penstock.reconciling.state_columns import (
    FLOAT4,
    FLOAT8,
    NUMBERS,
    SqlType,
    cast_values,
    fails,
    read_result_types,
    read_state_columns,
    refuse_unfit,
)
from penstock.reconciling.state_repair import CanonicalRows


class InlineComparer:
    """Compares in Postgres, which needs temporary space for canonical rows and for sorting."""

    engine = "inline"

    def __init__(
        self, database_url: str, report: str | None = None, *, with_rows: bool = False
    ) -> None:
        """Sets up; ``report`` is a directory for a ``.csv`` of each reconciliation's differences.

        ``with_rows`` gives the rows of both sides as well: in the report all, in the comparison
        ``SAMPLES``.
        """
        if report is not None and not report.endswith(".csv"):
            raise InvalidSetting(
                f"--report {report}: without Spark a report is CSV; end its name with .csv, or "
                "use --engine spark"
            )
        self._database_url, self._report, self._with_rows = database_url, report, with_rows

    def compare(
        self,
        spec: ReconciliationSpec,
        canonical: str,
        state: str,
        among: Sequence[str] | None = None,
    ) -> StateComparison:
        """Compares every key of both sides.

        Raises ``DeclarationError``, ``Unknown``, ``SnapshotLost``, ``PrivilegeMissing`` if the role
        may not create temporary tables, or ``ServerUnavailable``.
        """
        has_rows = self._with_rows or among is not None
        source = subquery(canonical_query(spec))

        def attempt(*, is_retry: bool = False) -> StateComparison:
            with self._in_snapshot(state, read_only=False) as state_connection:
                with self._in_snapshot(canonical) as canonical_connection:
                    join = _describe_join(
                        spec, source, canonical_connection, state_connection, is_retry=is_retry
                    )
                    state_connection.execute(join.create.encode())
                    compared = _copy(
                        canonical_connection,
                        join.select(0, among),
                        state_connection,
                        "penstock_expected",
                    )
                state_connection.execute(b"ANALYZE pg_temp.penstock_expected")
                state_connection.execute(join.compare(among, with_rows=has_rows).encode())
                result = _read_counts(state_connection, spec, join.columns, compared)
                return replace(
                    result,
                    differences=self._read_differences(
                        state_connection, spec, join, is_repair=among is not None
                    ),
                )

        try:
            return attempt()
        # a text of the state is no value of the canonical type, or a cast fails
        except psycopg.DataError:
            with self._naming_unfit(spec, source, canonical):
                return attempt(is_retry=True)

    def rows(self, spec: ReconciliationSpec, canonical: str) -> CanonicalRows:
        """Yields the canonical rows; they are read as they are consumed.  Raises as ``compare``."""
        source = subquery(canonical_query(spec))
        with self._in_snapshot(canonical) as connection:
            columns, values = _describe_rows(spec, source, connection)

        def each() -> Iterator[str]:
            with (
                self._naming_unfit(spec, source, canonical),
                self._in_snapshot(canonical) as connection,
            ):
                for (row,) in _stream(
                    connection, f"SELECT {_as_json(values)} FROM {source}", ["text"]
                ):
                    yield row

        return CanonicalRows(columns, each())

    @contextmanager
    def _naming_unfit(
        self, spec: ReconciliationSpec, source: str, canonical: str
    ) -> Iterator[None]:
        """Names the column whose type a canonical value does not fit."""
        try:
            yield
        except psycopg.DataError:
            with self._in_snapshot(canonical) as connection:
                types = read_result_types(connection, source)
                names = [*spec.key, *_choose_columns(spec, types)]
                state = read_state_columns(connection, spec, names)
                refuse_unfit(
                    connection,
                    spec,
                    source,
                    cast_values(connection, {n: types[n] for n in names}, state),
                    state,
                )
            raise

    @contextmanager
    def _in_snapshot(self, snapshot: str, *, read_only: bool = True) -> Iterator[Connection]:
        """Yields a connection that sees the database as of the snapshot, until the block ends."""
        url = self._database_url
        with connect_postgres(
            url, application="reconcile", prepare=False, kind=TableConnection
        ) as connection:
            connection.longest_silence_s = HANDLER_TIMEOUT_S  # a sort may take long
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            connection.read_only = read_only
            with postgres_errors("comparing in a snapshot", is_own=False), connection.transaction():
                import_snapshot(connection, snapshot)
                connection.execute(FIX_FORMATS)  # as in the transaction that repairs
                try:
                    yield connection
                except (psycopg.errors.SyntaxError, psycopg.errors.ReadOnlySqlTransaction) as error:
                    # Else a query that writes looks like a standby, for which all reconciliations
                    # end.
                    raise DeclarationError(
                        "reconcile: the canonical query must be one that reads: "
                        f"{first_line(error)}"
                    ) from error

    def _read_differences(
        self, connection: Connection, spec: ReconciliationSpec, join: "_Join", *, is_repair: bool
    ) -> list[Difference]:
        """Reads the first differences, in the order of their keys.

        Writes all of them into the report.
        """
        rows_kept = DIFFERENCES_KEPT if is_repair else SAMPLES
        differences: list[Difference] = []
        with self._open_report(spec.name, is_repair=is_repair) as write:
            for key, kind, columns, *rows in _stream(
                connection, join.differing, ["text", "text", "text[]", "text", "text"]
            ):
                difference = Difference(key, DifferenceKind(kind), tuple(columns), *rows)
                if write is not None:
                    write(difference)
                elif len(differences) == DIFFERENCES_KEPT:
                    break
                if len(differences) < DIFFERENCES_KEPT:
                    differences.append(
                        difference
                        if len(differences) < rows_kept
                        else replace(difference, expected=None, found=None)
                    )
        return differences

    @contextmanager
    def _open_report(
        self, name: str, *, is_repair: bool
    ) -> Iterator[Callable[[Difference], object] | None]:
        """Opens the report of a reconciliation; yields the function that writes a line.

        None without a report.
        """
        if self._report is None or is_repair:
            yield None
            return
        directory = Path(self._report)
        directory.mkdir(parents=True, exist_ok=True)
        fields = ("key", "kind", "columns", *(("expected", "found") if self._with_rows else ()))
        with (directory / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fields, extrasaction="ignore")
            writer.writeheader()
            yield lambda difference: writer.writerow(
                {**asdict(difference), "columns": ", ".join(difference.columns)}
            )


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of both sides: its name in the join, its two expressions, and their type."""

    name: str
    alias: str
    expressions: tuple[str, str]
    common: SqlType
    is_text: bool = False  # the state holds it as text

    def value(self, side: int) -> str:
        return _as_comparable(self.expressions[side], self.common)


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
        """Names of the compared columns."""
        return tuple(column.name for column in self.values)

    @property
    def create(self) -> str:
        """Creates the table of the canonical rows."""
        typed = (
            f"{column.alias} {column.common.name if column.common.is_native else _TEXT}"
            for column in (*self.keys, *self.values)
        )
        return f"CREATE TEMPORARY TABLE penstock_expected ({', '.join(typed)}) ON COMMIT DROP"

    def select(self, side: int, among: Sequence[str] | None) -> str:
        """Selects the canonical rows, or those of the state."""
        compared = (
            f"{column.value(side)} AS {column.alias}" for column in (*self.keys, *self.values)
        )
        relation, where = (self.source, self.table)[side], self._where(side, among)
        return f"SELECT {', '.join(compared)} FROM {relation} {where}"

    def compare(self, among: Sequence[str] | None, *, with_rows: bool) -> str:
        """Creates the table of keys that differ, are NULL, or are twice in the canonical rows."""
        keys = [key.alias for key in self.keys]
        joined = ", ".join(
            [
                *(f"coalesce(e.{key}, f.{key}) AS {key}" for key in keys),
                *(
                    f"e.{column.alias} AS e{column.alias}, f.{column.alias} AS f{column.alias}"
                    for column in self.values
                ),
            ]
        )
        differs = {column.name: self._differs(column) for column in self.values}
        changed_columns = ", ".join(
            f"CASE WHEN {condition} THEN {quote_literal(name)} END"
            for name, condition in differs.items()
        )
        is_null = " OR ".join(f"{key} IS NULL" for key in keys) or "false"
        rows = ", ".join(
            f"CASE WHEN {side}_copies > 0 THEN {self._row(side[0])} END AS {side}"
            if with_rows
            else f"NULL AS {side}"
            for side in ("expected", "found")
        )
        return f"""
            CREATE TEMPORARY TABLE penstock_differing ON COMMIT DROP AS
            SELECT {", ".join([*keys, ""])} coalesce(expected_copies, found_copies) AS copies,
                   CASE WHEN {is_null} THEN NULL
                        WHEN expected_copies > 1 THEN 'twice'
                        WHEN found_copies IS NULL THEN 'missing'
                        WHEN expected_copies IS NULL THEN 'surplus'
                        WHEN found_copies > 1 THEN 'doubled'
                        ELSE 'different' END AS kind,
                   {_as_json({key.name: (key.alias, key.common) for key in self.keys})} AS key,
                   CASE WHEN expected_copies = 1 AND found_copies = 1
                        THEN array_remove(ARRAY[{changed_columns}]::text[], NULL)
                        ELSE '{{}}' END AS columns,
                   {rows}
            FROM (
                SELECT {joined + ", " if joined else ""}
                       e.copies AS expected_copies, f.copies AS found_copies
                FROM {self._once("pg_temp.penstock_expected")} e
                FULL JOIN {self._once(f"({self.select(1, among)})")} f
                ON {" AND ".join(f"e.{key} = f.{key}" for key in keys) or "true"}
            ) joined
            WHERE expected_copies IS DISTINCT FROM 1 OR found_copies IS DISTINCT FROM 1
                  {"".join(f" OR {condition}" for condition in differs.values())}
        """

    @property
    def differing(self) -> str:
        """Reads that table."""
        order = ", ".join(key.alias for key in self.keys) or "1"
        columns = "key, kind, columns, expected, found"
        return f"SELECT {columns} FROM pg_temp.penstock_differing ORDER BY {order}"

    def _once(self, source: str) -> str:
        """Selects one row of each key, and the number of its rows."""
        key_columns = ", ".join(key.alias for key in self.keys)
        window = f"(PARTITION BY {key_columns})" if key_columns else "()"
        numbered = "*, count(*) OVER w AS copies, row_number() OVER w AS place"
        counted = f"SELECT {numbered} FROM {source} s WINDOW w AS {window}"
        return f"(SELECT * FROM ({counted}) t WHERE place = 1)"

    def _differs(self, column: _Column) -> str:
        """Renders the condition that values of a column differ by more than its tolerance."""
        one, other = f"e{column.alias}", f"f{column.alias}"
        tolerance = self.spec.tolerance.get(column.name)
        if tolerance is None or column.common.oid not in NUMBERS:
            return f"{one} IS DISTINCT FROM {other}"
        # Through their text, because a cast of a float rounds it to 15 digits.
        apart = (
            f"abs(CAST(CAST({one} AS text) AS numeric) - CAST(CAST({other} AS text) AS numeric))"
        )
        is_near = f"{apart} <= CAST('{tolerance}' AS numeric)"
        return f"({one} IS DISTINCT FROM {other} AND ({is_near}) IS NOT TRUE)"

    def _row(self, side: str) -> str:
        keys = {key.name: (key.alias, key.common) for key in self.keys}
        values = {column.name: (f"{side}{column.alias}", column.common) for column in self.values}
        texts = {
            column.name: (f"CAST({side}{column.alias} AS text)", _TEXT_TYPE)
            for column in self.values
            if column.is_text
        }
        return _as_json(keys | values | texts)

    def _where(self, side: int, among: Sequence[str] | None) -> str:
        """Renders the condition for the rows of some keys.

        Postgres can push the condition on a single column below a GROUP BY, and answer it from an
        index.
        """
        if among is None or not self.keys:
            return ""
        rows = [json.loads(text, parse_float=str, parse_int=str) for text in among]
        lists = {key: _text_array(row[key.name] for row in rows) for key in self.keys}
        casts = {key: key.expressions[side] for key in self.keys}
        conditions = [
            f"{casts[key]} = ANY (CAST({lists[key]} AS {key.common.name}[]))"
            for key in self.keys
            if not key.common.name.endswith("[]")
        ]
        typed = ", ".join(f"CAST(w.{key.alias} AS {key.common.name})" for key in self.keys)
        names = ", ".join(key.alias for key in self.keys)
        if len(conditions) != 1 or len(self.keys) != 1:
            conditions.append(
                f"({', '.join(casts.values())}) IN (SELECT {typed} FROM "
                f"unnest({', '.join(lists.values())}) AS w ({names}))"
            )
        return f"WHERE {' AND '.join(conditions)}"


_TEXT = 'text COLLATE "C"'
_TEXT_TYPE = SqlType(types["text"].oid, "text")


def _describe_join(
    spec: ReconciliationSpec,
    source: str,
    canonical_connection: Connection,
    state_connection: Connection,
    *,
    is_retry: bool,
) -> _Join:
    """Finds the columns of both sides.

    ``is_retry`` looks for texts of the state that do not parse as the canonical type.
    """
    expected = read_result_types(canonical_connection, source)
    table = quote(spec.schema, spec.table)
    columns = _choose_columns(spec, expected)
    names = [*spec.key, *columns]
    state_columns = read_state_columns(state_connection, spec, names)
    casts = cast_values(
        canonical_connection, {name: expected[name] for name in names}, state_columns
    )

    def pair(name: str, alias: str) -> _Column:
        canonical, column = expected[name], state_columns[name]
        parsed = f"CAST({quote(name)} AS {canonical.name})"
        is_parsed = name not in spec.key and column.is_text_for(canonical)
        if is_parsed and not (is_retry and fails(state_connection, table, parsed)):
            return _Column(name, alias, (quote(name), parsed), canonical, is_text=True)
        state_value = (
            quote(name)
            if column.type.oid == column.oid
            else f"CAST({quote(name)} AS {column.type.name})"
        )
        return _Column(name, alias, (casts[name], state_value), column.type)

    return _Join(
        spec,
        source,
        table,
        [pair(name, f"k{number}") for number, name in enumerate(spec.key)],
        [pair(name, f"v{number}") for number, name in enumerate(columns)],
    )


def _describe_rows(
    spec: ReconciliationSpec, source: str, connection: Connection
) -> tuple[tuple[str, ...], dict[str, tuple[str, SqlType]]]:
    """Returns the compared columns, and the expression and type of each written one."""
    types = read_result_types(connection, source)
    columns = _choose_columns(spec, types)
    names = [*spec.key, *columns]
    state = read_state_columns(connection, spec, names)
    casts = cast_values(connection, {name: types[name] for name in names}, state)
    return columns, {
        name: (_as_comparable(casts[name], state[name].type), state[name].type) for name in names
    }


def _choose_columns(spec: ReconciliationSpec, types: Mapping[str, SqlType]) -> tuple[str, ...]:
    columns = choose_columns(spec, types)
    for column in spec.tolerance:
        if types[column].oid not in NUMBERS:
            raise DeclarationError(
                f"reconciliation {spec.name}: tolerance is for numbers; {column} is "
                f"{types[column].name}"
            )
    return columns


def _as_comparable(value: str, common: SqlType) -> str:
    """Renders the expression for comparing and ordering.

    Text by its bytes, whatever the collation.
    """
    return value if common.is_native else f'CAST({value} AS text) COLLATE "C"'


def _as_json(values: Mapping[str, tuple[str, SqlType]]) -> str:
    """Renders columns as JSON that Postgres can read as a row.

    Numbers and booleans as such, anything else as text.  Negative zero of a float is text, because
    numbers of JSON in Postgres are of type numeric.
    """
    fields = (
        f"CASE CAST({value} AS text) WHEN '-0' THEN to_json(text '-0') ELSE to_json({value}) END "
        f"AS {quote(name)}"
        if type_.oid in {FLOAT4, FLOAT8}
        else f"{value} AS {quote(name)}"
        for name, (value, type_) in values.items()
    )
    return f"(SELECT row_to_json(r.*)::text FROM (SELECT {', '.join(fields)}) r)"


def _text_array(values: Iterable[object]) -> str:
    texts = [value if isinstance(value, str) else str(value).lower() for value in values]
    return sql.SQL("{}::text[]").format(texts).as_string(None)


def _copy(source: Connection, query: str, target: Connection, table: str) -> int:
    """Copies the rows of a query into a temporary table of another connection.

    Returns their number.
    """
    with (
        source.cursor().copy(f"COPY ({query}) TO STDOUT".encode()) as out,
        target.cursor() as cursor,
    ):
        with cursor.copy(f"COPY pg_temp.{table} FROM STDIN".encode()) as into:
            for data in out:
                into.write(data)
        return cursor.rowcount


def _stream(
    connection: Connection, query: str, of_types: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of a query, one after the other."""
    with connection.cursor().copy(f"COPY ({query}) TO STDOUT".encode()) as copy:
        copy.set_types(of_types)
        yield from copy.rows()


def _read_counts(
    connection: Connection, spec: ReconciliationSpec, columns: tuple[str, ...], copied: int
) -> StateComparison:
    """Counts the differing keys, by kind and by column."""
    by_kind = (
        "SELECT kind, count(*), sum(copies)::bigint FROM pg_temp.penstock_differing GROUP BY kind"
    )
    counts_by_kind = {kind: (keys, rows) for kind, keys, rows in connection.execute(by_kind)}
    check_keys(
        spec,
        without_key=counts_by_kind.get(None, (0, 0))[1],
        twice=counts_by_kind.get("twice", (0, 0))[0],
    )
    by_name = (
        "SELECT name, count(*) "
        "FROM pg_temp.penstock_differing, unnest(columns) AS name GROUP BY name"
    )
    counts_by_column: dict[str, int] = dict(connection.execute(by_name).fetchall())
    counts = {kind: counts_by_kind[kind][0] for kind in DifferenceKind if kind in counts_by_kind}
    return StateComparison(
        copied + counts.get(DifferenceKind.SURPLUS, 0),
        counts,
        [],
        columns,
        {column: counts_by_column[column] for column in columns if column in counts_by_column},
    )
