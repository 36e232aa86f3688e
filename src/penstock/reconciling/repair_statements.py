"""The SQL that repairs or replaces a consumer's state table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import DeclarationError


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The SQL type of a column.

    Attributes:
        declared: As declared: ``numeric(12,2)``.
        unlimited: Without a length, precision or scale: ``numeric``.  A cast to the declared type may round or truncate.
    """

    declared: str
    unlimited: str


class RepairStatements:
    """Statements over a state table: its names come from the declaration and are quoted.

    Rows are JSON.  Their values are cast from text, which every Postgres type can parse: a document or an array arrives as
    its text.
    """

    def __init__(
        self,
        spec: ReconciliationSpec,
        columns: Sequence[str],
        types: Mapping[str, ColumnType],
        incoming: sql.Identifier = sql.Identifier("pg_temp", "penstock_incoming_0"),  # noqa: B008  a constant
    ) -> None:
        """Builds the statements.

        Args:
            spec: The reconciliation.
            columns: The columns to set, besides the key.
            types: The SQL type of each column of the table.
            incoming: The temporary table of the rows for ``insert_incoming``.

        Raises:
            DeclarationError: The table lacks one of the columns.
        """
        _check_columns(spec, columns, types)
        self._names = _build_names(spec, columns, types, incoming)
        self.delete_all = self._build("DELETE FROM {table}")
        self.insert_incoming = self._build("INSERT INTO {table} ({columns}) SELECT {incoming} FROM {incoming_rows} i")
        # The first column that cannot hold one of its values, if there is any.
        self.find_unfit = self._build(
            "SELECT unfit.name FROM (SELECT {unfit_expected} AS name FROM pg_temp.penstock_differences d) unfit "
            "WHERE unfit.name IS NOT NULL LIMIT 1"
        )
        self.find_unfit_incoming = self._build(
            "SELECT unfit.name FROM (SELECT {unfit_incoming} AS name FROM {incoming_rows} i) unfit "
            "WHERE unfit.name IS NOT NULL LIMIT 1"
        )
        self.keys = self._build(
            'CREATE TEMPORARY TABLE penstock_keys ON COMMIT DROP AS SELECT d.number AS "penstock number" {key_values} '
            "FROM pg_temp.penstock_differences d"
        )
        self.analyse = self._build("ANALYZE pg_temp.penstock_keys")
        self.note_before = self._build_note("before")
        self.note_after = self._build_note("after")
        # Deletes surplus rows, and all rows of a doubled key.
        self.delete = self._build(
            "DELETE FROM {table} s USING pg_temp.penstock_keys k, pg_temp.penstock_differences d "
            """WHERE {same} AND d.number = k."penstock number" AND (d.expected IS NULL OR d.kind = 'doubled')"""
        )
        self.update = self._build(
            "UPDATE {table} s SET {set} FROM pg_temp.penstock_keys k, pg_temp.penstock_differences d "
            """WHERE {same} AND d.number = k."penstock number" AND d.kind = 'different'"""
        )
        # A concurrent run may have inserted the row already: at the same cut, so it is the same row.
        self.insert = self._build(
            "INSERT INTO {table} ({columns}) SELECT {expected} FROM pg_temp.penstock_differences d "
            "WHERE d.kind IN ('missing', 'doubled') AND d.expected IS NOT NULL AND NOT EXISTS ("
            """SELECT FROM {table} s, pg_temp.penstock_keys k WHERE {same} AND k."penstock number" = d.number)"""
        )

    @property
    def repair(self) -> tuple[sql.Composed, ...]:
        """The statements of a repair, in order."""
        return (self.keys, self.analyse, self.note_before, self.delete, self.update, self.insert, self.note_after)

    def _build_note(self, column: str) -> sql.Composed:
        """Records the current rows of each key in a column of the differences."""
        return sql.SQL(
            "UPDATE pg_temp.penstock_differences d SET {column} = rows.found FROM ("
            'SELECT k."penstock number" AS number, CASE count(*) WHEN 1 THEN jsonb_agg(to_jsonb(s)) -> 0 ELSE jsonb_agg(to_jsonb(s)) END AS found '
            'FROM {table} s, pg_temp.penstock_keys k WHERE {same} GROUP BY k."penstock number") rows WHERE rows.number = d.number'
        ).format(column=sql.Identifier(column), **self._names)

    def _build(self, text: LiteralString) -> sql.Composed:
        return sql.SQL(text).format(**self._names)


def _check_columns(spec: ReconciliationSpec, columns: Sequence[str], types: Mapping[str, ColumnType]) -> None:
    missing = [column for column in (*spec.key, *columns) if column not in types]
    if missing:
        raise DeclarationError(
            f"reconciliation {spec.name}: {spec.state} has no column {missing[0]!r}; it has {', '.join(types)}"
        )


def _build_names(
    spec: ReconciliationSpec, columns: Sequence[str], types: Mapping[str, ColumnType], incoming: sql.Identifier
) -> dict[str, sql.Composable]:
    """The parts of the statements that depend on the table."""

    def value(row: LiteralString, column: str) -> sql.Composed:
        return sql.SQL("CAST({} ->> {} AS {})").format(
            sql.SQL(row), sql.Literal(column), sql.SQL(types[column].declared)
        )

    everything = (*spec.key, *columns)
    return {
        "table": sql.Identifier(*filter(None, (spec.schema, spec.table))),
        "same": _match_key(spec.key, "s", "k"),
        "set": sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(column), value("d.expected", column))
            for column in columns or spec.key  # rows of nothing but a key do not differ
        ),
        "columns": sql.SQL(", ").join(map(sql.Identifier, everything)),
        "incoming_rows": incoming,
        "incoming": sql.SQL(", ").join(value("i.row", column) for column in everything),
        "expected": sql.SQL(", ").join(value("d.expected", column) for column in everything),
        "unfit_expected": _find_unfit("d.expected", everything, types),
        "unfit_incoming": _find_unfit("i.row", everything, types),
        "key_values": sql.SQL("").join(
            sql.SQL(", {} AS {}").format(value("d.key", column), sql.Identifier(column)) for column in spec.key
        ),
    }


def _find_unfit(row: LiteralString, columns: Sequence[str], types: Mapping[str, ColumnType]) -> sql.Composable:
    """The name of a column whose type would round or truncate the value of a row; NULL if there is none."""
    limited = [c for c in columns if types[c].declared != types[c].unlimited]
    cases = [
        sql.SQL("WHEN {value} IS DISTINCT FROM CAST({value} AS {declared}) THEN {column}").format(
            value=sql.SQL("CAST({} ->> {} AS {})").format(
                sql.SQL(row), sql.Literal(column), sql.SQL(types[column].unlimited)
            ),
            declared=sql.SQL(types[column].declared),
            column=sql.Literal(column),
        )
        for column in limited
    ]
    return sql.SQL("CASE {} END").format(sql.SQL(" ").join(cases)) if cases else sql.SQL("NULL")


def _match_key(key: Sequence[str], one: LiteralString, other: LiteralString) -> sql.Composable:
    """The condition that rows of two tables have the same key; always true without a key."""
    if not key:
        return sql.SQL("true")
    return sql.SQL(" AND ").join(
        sql.SQL(one + ".{0} = " + other + ".{0}").format(sql.Identifier(column)) for column in key
    )
