"""Writes canonical rows into a state's table.

The least change, in an order that foreign keys allow, or none.  Surplus rows are deleted first, in
referring tables before referenced ones; then rows are updated and inserted, the other way round;
then surplus rows that were still referred to are deleted.  Deferrable constraints are checked at
the end.

A row that another table refers to is not deleted, nor is the value changed that it is referred by:
the foreign key would change or remove the other table's rows.  It is left, and the constraint is
named.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from penstock.database.connections import Connection
from penstock.database.driver_errors import LACKS_PRIVILEGE, ErrorKind, classify, sqlstate
from penstock.database.statements import quote
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import RepairRefused
from penstock.reconciling.comparison import check_keys
from penstock.reconciling.state_columns import (
    CATALOG,
    NATIVE,
    StateColumn,
    read_columns,
    require_columns,
    unfit,
)

_NUMBER, _KIND, _BLOCKED = map(
    sql.Identifier, ("penstock number", "penstock kind", "penstock blocked")
)
_NO_ACTION, _RESTRICT = "a", "r"
_ACTIONS = {
    _NO_ACTION: " NO ACTION",
    _RESTRICT: " RESTRICT",
    "c": " CASCADE",
    "n": " SET NULL",
    "d": " SET DEFAULT",
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A foreign key that refers to a state's table."""

    constraint_name: str
    child: int
    child_schema: str
    child_table: str
    is_self: bool
    is_deferrable: bool
    on_delete: str
    on_update: str
    columns: Sequence[str]
    referenced: Sequence[str]

    def describe(self, action: str = "") -> str:
        """Describes the constraint and its table."""
        return (
            f"constraint {self.constraint_name} of {self.child_schema}.{self.child_table}{action}"
        )

    @property
    def is_checked_late(self) -> bool:
        """True if the referenced row may be missing until the check at the end."""
        return self.is_deferrable and self.on_delete == _NO_ACTION


class StateTable:
    """A state's table in a transaction, and the rows that belong into it, in a temporary table.

    The names of its types are written while the search_path is ours, its statements are executed
    with the role's.
    """

    def __init__(
        self,
        connection: Connection,
        spec: ReconciliationSpec,
        table: int,
        columns: Sequence[str],
        number: int = 0,
    ) -> None:
        """Reads the table's columns and the foreign keys that refer to it."""
        self.spec, self._connection, self._table, self._number = spec, connection, table, number
        table_columns = read_columns(connection, table)
        require_columns(spec, (*spec.key, *columns), table_columns)
        self.columns = table_columns
        self._names = (*spec.key, *columns)
        self._compared = columns
        with connection.cursor(row_factory=class_row(Reference)) as cursor:
            self.references = cursor.execute(CATALOG["references"], {"table": table}).fetchall()
        self.tree = {oid for (oid,) in connection.execute(CATALOG["descendants"], {"table": table})}
        self._interceptors = [
            name for (name,) in connection.execute(CATALOG["interceptors"], {"table": table})
        ]
        self._parts = self._build_parts()

    def execute(self, text: LiteralString, **more: sql.Composable) -> psycopg.Cursor[Any]:
        """Executes a statement after filling in the table's named parts."""
        return self._connection.execute(sql.SQL(text).format(**{**self._parts, **more}))

    def _build_parts(self) -> dict[str, sql.Composable]:
        written = [name for name in self._names if not self.columns[name].is_generated]
        compared = [
            name
            for name in self._compared
            if name in written and not self.columns[name].is_identity
        ]
        return {
            "table": sql.Identifier(*filter(None, (self.spec.schema, self.spec.table))),
            "rows": self._temporary("rows"),
            "surplus": self._temporary("surplus"),
            "moved": self._temporary("moved"),
            "number": _NUMBER,
            "kind": _KIND,
            "blocked": _BLOCKED,
            "typed": sql.SQL("").join(
                sql.SQL(", {} {}").format(sql.Identifier(name), sql.SQL(self.columns[name].limited))
                for name in self._names
            ),
            # Rows of two tables have the same key; always, without a key.
            "same": _all(_same(self.columns[name]) for name in self.spec.key),
            "is_row": sql.SQL("s.ctid = d.place AND s.tableoid = d.part"),
            "differs": self._differs(self._compared),
            "columns": sql.SQL(", ").join(map(sql.Identifier, written)),
            "values": sql.SQL(", ").join(
                sql.SQL("r.{}").format(sql.Identifier(name)) for name in written
            ),
            "set": sql.SQL(", ").join(
                sql.SQL("{0} = r.{0}").format(sql.Identifier(name)) for name in compared
            ),
        }

    def _temporary(self, name: str) -> sql.Identifier:
        return sql.Identifier("pg_temp", f"penstock_{name}_{self._number}")

    def _differs(self, columns: Iterable[str]) -> sql.Composed:
        """Renders the condition that row ``s`` of the state differs from ``r`` in some columns."""
        return _any(_differ(self.columns[name], self.spec.tolerance.get(name)) for name in columns)

    def parse_rows(self, source: sql.Composable) -> None:
        """Casts rows from JSON into the temporary table.

        ``source`` has the columns ``number``, ``kind`` and ``row``.  Refuses what the state's
        columns cannot hold.
        """
        self.execute(
            "CREATE TEMPORARY TABLE {name} ({number} bigint NOT NULL, {kind} text NOT NULL, "
            "{blocked} text{typed}) ON COMMIT DROP",
            name=sql.Identifier(f"penstock_rows_{self._number}"),
        )
        parse = sql.SQL("{source} d, LATERAL jsonb_to_record(d.row) AS x ({fields})").format(
            source=source, fields=sql.SQL(", ").join(map(_field, self._columns()))
        )
        try:
            with self._connection.transaction():
                self._refuse_too_long(parse)
                self.execute(
                    "INSERT INTO {rows} SELECT d.number, d.kind, NULL, {parsed} FROM {parse}",
                    parsed=sql.SQL(", ").join(map(_parsed, self._columns())),
                    parse=parse,
                )
        except psycopg.DataError as error:
            raise next(self._find_unfit(source), error) from error
        self.execute("ANALYZE {rows}")

    def _columns(self) -> list[StateColumn]:
        return [self.columns[name] for name in self._names]

    def _find_unfit(self, source: sql.Composable) -> Iterator[Exception]:
        for column in self._columns():
            try:
                with self._connection.transaction(force_rollback=True):
                    self._connection.execute(
                        sql.SQL("CREATE TEMPORARY TABLE penstock_probe (v {})").format(
                            sql.SQL(column.limited)
                        )
                    )
                    self.execute(
                        "INSERT INTO pg_temp.penstock_probe SELECT {parsed} FROM {source} d, "
                        "LATERAL jsonb_to_record(d.row) AS x ({field})",
                        parsed=_parsed(column),
                        source=source,
                        field=_field(column),
                    )
            except psycopg.DataError:
                yield unfit(self.spec, column)

    def _refuse_too_long(self, parse: sql.Composable) -> None:
        """Refuses texts that are too long.

        A cast to a length drops trailing spaces, and the next comparison finds them again.
        """
        sized = [column for column in self._columns() if column.is_sized]
        if not sized:
            return
        cases = (
            sql.SQL(
                "WHEN CAST(CAST({0} AS {1}) AS text) <> CAST(CAST(CAST({0} AS {2}) AS {1}) AS "
                "text) THEN {3}"
            ).format(
                _parsed(column),
                sql.SQL(column.type.name),
                sql.SQL(column.limited),
                sql.Literal(column.name),
            )
            for column in sized
        )
        too_long = self.execute(
            "SELECT f.name FROM (SELECT CASE {cases} END AS name FROM {parse}) f WHERE f.name IS "
            "NOT NULL LIMIT 1",
            cases=sql.SQL(" ").join(cases),
            parse=parse,
        ).fetchone()
        if too_long is not None:
            raise unfit(self.spec, self.columns[too_long[0]])

    def check_keys(self) -> None:
        """Checks that a key identifies a row."""
        nulls = _any(sql.SQL("{} IS NULL").format(sql.Identifier(name)) for name in self.spec.key)
        [(without_key, twice)] = self.execute(
            "SELECT (SELECT count(*) FROM {rows} WHERE {nulls}), "
            "(SELECT count(*) FROM (SELECT FROM {rows} {grouped} HAVING count(*) > 1) t)",
            nulls=nulls,
            grouped=self._grouped,
        )
        check_keys(self.spec, without_key=without_key, twice=twice)

    def mark_doubled(self) -> None:
        """Marks the rows that the state has more than once."""
        keys = sql.SQL(", ").join(map(sql.Identifier, self.spec.key))
        self.execute(
            "UPDATE {rows} r SET {kind} = 'doubled' FROM (SELECT {keys} FROM {table} {grouped} "
            "HAVING count(*) > 1) s WHERE {same}",
            keys=keys,
            grouped=self._grouped,
        )

    @property
    def _grouped(self) -> sql.Composable:
        """Groups rows by their key, as ``_same`` compares it; without a key, all of them."""
        names = [sql.Identifier(name) for name in self.spec.key]
        coarse = (
            sql.Identifier(name) for name in self.spec.key if self.columns[name].oid not in NATIVE
        )
        texts = (sql.SQL('CAST({} AS text) COLLATE "C"').format(name) for name in coarse)
        return (
            sql.SQL("GROUP BY {}").format(sql.SQL(", ").join([*names, *texts]))
            if names
            else sql.SQL("")
        )

    def find_surplus(self, *, is_whole: bool) -> None:
        """Notes and locks the surplus rows.

        Of a whole state also all whose key is not among the canonical rows.
        """
        self.execute(
            "CREATE TEMPORARY TABLE {name} (place tid, part oid, number bigint, blocked text) ON "
            "COMMIT DROP",
            name=sql.Identifier(f"penstock_surplus_{self._number}"),
        )
        self.execute(
            "INSERT INTO {surplus} SELECT s.ctid, s.tableoid, r.{number} FROM {table} s JOIN "
            "{rows} r ON {same} WHERE r.{kind} IN ('surplus', 'doubled') FOR UPDATE OF s"
        )
        if is_whole:
            self.execute(
                "INSERT INTO {surplus} SELECT s.ctid, s.tableoid, NULL FROM {table} s "
                "WHERE NOT EXISTS (SELECT FROM {rows} r WHERE {same}) FOR UPDATE OF s"
            )
        self.execute("ANALYZE {surplus}")

    def delete_surplus(self, group: Sequence["StateTable"]) -> None:
        """Deletes the surplus rows that no other row refers to."""
        self.execute("UPDATE {surplus} SET blocked = NULL WHERE blocked IS NOT NULL")
        [(count,)] = self.execute("SELECT count(*) FROM {surplus}")
        if not count:
            return
        self._block("surplus", group, self.references)
        self._delete("surplus")
        self.execute("DELETE FROM {surplus} WHERE blocked IS NULL")

    def _delete(self, name: str) -> None:
        """Deletes the noted rows that are not blocked, and checks that they are gone."""
        noted_rows = self._temporary(name)
        [(count,)] = self.execute(
            "SELECT count(*) FROM {noted_rows} WHERE blocked IS NULL", noted_rows=noted_rows
        )
        deleted = self.execute(
            "DELETE FROM {table} s USING {noted_rows} d WHERE {is_row} AND d.blocked IS NULL",
            noted_rows=noted_rows,
        ).rowcount
        if deleted != count:
            raise self._not_taken()

    def _block(
        self, name: str, group: Sequence["StateTable"], references: Iterable[Reference]
    ) -> None:
        """Marks noted rows that other rows refer to.

        A row that is left may refer to another one.
        """
        noted_rows, marked = self._temporary(name), True
        while marked:
            marked = False
            for reference in references:
                marked |= bool(
                    self.execute(
                        "UPDATE {noted_rows} d SET blocked = {reason} FROM {table} s WHERE "
                        "{is_row} AND d.blocked IS NULL AND {referred}",
                        noted_rows=noted_rows,
                        reason=sql.Literal(
                            reference.describe(f" ON DELETE{_ACTIONS[reference.on_delete]}")
                        ),
                        referred=self._is_referred(reference, group, noted_rows),
                    ).rowcount
                )

    def _is_referred(
        self,
        reference: Reference,
        group: Sequence["StateTable"],
        noted_rows: sql.Composable | None = None,
    ) -> sql.Composed:
        """Renders the condition that a row that stays refers to ``s``."""
        goes: sql.Composable = sql.SQL("")
        for other in group:
            if reference.child in other.tree and (reference.is_self or reference.is_checked_late):
                surplus = (
                    noted_rows
                    if noted_rows is not None and other is self
                    else other._temporary("surplus")  # noqa: SLF001  of the same class
                )
                goes = sql.SQL(
                    " AND NOT EXISTS (SELECT FROM {} g WHERE g.place = c.ctid AND g.part = "
                    "c.tableoid AND g.blocked IS NULL)"
                ).format(surplus)
        return sql.SQL("EXISTS (SELECT FROM {child} c WHERE {same}{goes})").format(
            child=sql.Identifier(reference.child_schema, reference.child_table),
            same=_all(
                sql.SQL("c.{} = s.{}").format(sql.Identifier(referring), sql.Identifier(referenced))
                for referring, referenced in zip(
                    reference.columns, reference.referenced, strict=True
                )
            ),
            goes=goes,
        )

    def write(self, group: Sequence["StateTable"]) -> None:
        """Updates the rows that differ, and inserts those that are missing.

        Rows that exchange the values of a unique index cannot be updated one after the other: they
        are deleted and inserted.
        """
        self._block_updates(group)
        moving = {name for name in self._compared if self.columns[name].is_identity}
        while True:
            try:
                with self._connection.transaction():
                    self._write(group, moving)
            except (psycopg.errors.UniqueViolation, psycopg.errors.ExclusionViolation) as error:
                unique_columns = self._find_unique(error)
                if unique_columns <= moving:
                    raise
                moving |= unique_columns
            else:
                return

    def _write(self, group: Sequence["StateTable"], moving: Collection[str]) -> None:
        if moving:
            self._move(group, moving)
        update: LiteralString = (
            "UPDATE {table} s SET {set} FROM {rows} r WHERE {same} AND r.{kind} NOT IN "
            "('surplus', 'doubled') AND r.{blocked} IS NULL AND ({differs})"
        )
        # A concurrent run may have inserted the row already: at the same cut, so it is the same
        # row.
        insert: LiteralString = (
            "INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {values} FROM {rows} r "
            "WHERE r.{kind} <> 'surplus' AND r.{blocked} IS NULL AND NOT EXISTS (SELECT FROM "
            "{table} s WHERE {same})"
        )
        if not self._is_updatable:
            self.execute(insert)
        elif any(reference.is_self for reference in self.references):
            # In one statement, after which they are checked: a row may come to refer to one that is
            # inserted, and the reverse. The part in WITH is executed last.
            self.execute("WITH inserted AS (" + insert + ") " + update)
        else:
            self.execute(update)
            self.execute(insert)

    @property
    def _is_updatable(self) -> bool:
        return any(
            not (c.is_generated or c.is_identity)
            for c in (self.columns[name] for name in self._compared)
        )

    def _move(self, group: Sequence["StateTable"], moving: Collection[str]) -> None:
        """Deletes and inserts the rows that differ in some columns.

        Keeps the values of other columns.
        """
        compared = [name for name in self._compared if name in moving]
        differs = (
            self._differs(compared) if len(compared) == len(moving) else self._parts["differs"]
        )
        self.execute("DROP TABLE IF EXISTS {moved}")
        self.execute(
            "CREATE TEMPORARY TABLE {name} (place tid, part oid, number bigint, blocked text, old "
            "{table}) ON COMMIT DROP",
            name=sql.Identifier(f"penstock_moved_{self._number}"),
        )
        self.execute(
            "INSERT INTO {moved} SELECT s.ctid, s.tableoid, r.{number}, NULL, CAST(s.* AS "
            "{table}) FROM {table} s JOIN {rows} r ON {same} WHERE r.{kind} NOT IN ('surplus', "
            "'doubled') AND r.{blocked} IS NULL AND ({moving}) FOR UPDATE OF s",
            moving=differs,
        )
        self._block("moved", group, [r for r in self.references if not r.is_checked_late])
        blocked = self.execute(
            "SELECT blocked FROM {moved} WHERE blocked IS NOT NULL LIMIT 1"
        ).fetchone()
        if blocked is not None:
            raise RepairRefused(
                f"rows of {self.spec.state} can only be repaired by deleting and inserting them, "
                f"because of {', '.join(sorted(moving))}, and {blocked[0]} refers to them. They "
                "are unchanged. Make the unique constraint DEFERRABLE, or repair these rows by "
                "hand"
            )
        self._delete("moved")
        names = [c.name for c in self.columns.values() if not c.is_generated]
        self.execute(
            "INSERT INTO {table} ({all}) OVERRIDING SYSTEM VALUE SELECT {merged} FROM {moved} d "
            "JOIN {rows} r ON r.{number} = d.number",
            all=sql.SQL(", ").join(map(sql.Identifier, names)),
            merged=sql.SQL(", ").join(
                sql.SQL("r.{}" if name in self._compared else "(d.old).{}").format(
                    sql.Identifier(name)
                )
                for name in names
            ),
        )

    def _find_unique(self, error: psycopg.Error) -> set[str]:
        """Finds the columns of the unique index that an error names.

        All compared ones if it has others.
        """
        values = {"table": self._table, "name": error.diag.constraint_name}
        names = {name for (name,) in self._connection.execute(CATALOG["unique_columns"], values)}
        return names if names and names <= set(self._compared) else set(self._compared)

    def _block_updates(self, group: Sequence["StateTable"]) -> None:
        """Marks rows whose update would change a value that other rows refer to.

        Without an action, another row may take it over, and the rows of the group may come to refer
        to another one.
        """
        for reference in self.references:
            written = set(reference.referenced) & set(self._compared)
            generated = any(self.columns[name].is_generated for name in reference.referenced)
            is_late = reference.on_update == _NO_ACTION
            if not (written or generated) or (
                is_late and any(reference.child in table.tree for table in group)
            ):
                continue
            taken_over = self._is_taken_over(reference) if is_late else sql.SQL("false")
            self.execute(
                "UPDATE {rows} r SET {blocked} = {reason} FROM {table} s WHERE {same} AND "
                "r.{kind} NOT IN ('surplus', 'doubled') AND r.{blocked} IS NULL AND ({changes}) "
                "AND {referred} AND NOT {taken_over}",
                reason=sql.Literal(
                    reference.describe(f" ON UPDATE{_ACTIONS[reference.on_update]}")
                ),
                changes=self._parts["differs"] if generated else self._differs(written),
                referred=self._is_referred(reference, ()),
                taken_over=taken_over,
            )

    def _is_taken_over(self, reference: Reference) -> sql.Composable:
        """Renders the condition that another row takes over the values of a referenced ``s``."""
        if not set(reference.referenced) <= set(self._names):
            return sql.SQL("false")
        same = _all(
            sql.SQL("t.{0} = s.{0}").format(sql.Identifier(name)) for name in reference.referenced
        )
        return sql.SQL(
            "EXISTS (SELECT FROM {} t WHERE t.{} <> 'surplus' AND t.{} IS NULL AND {})"
        ).format(self._parts["rows"], _KIND, _BLOCKED, same)

    def check(self) -> None:
        """Checks that each row is in the state as it belongs there, once.

        A trigger or a rule may have intervened.  It may also have written other rows of the state:
        none but the rows that belong there are of this transaction.
        """
        wrong = self.execute(
            "SELECT FROM {rows} r LEFT JOIN {table} s ON {same} WHERE r.{kind} <> 'surplus' AND "
            "r.{blocked} IS NULL AND (s.tableoid IS NULL OR ({differs})) "
            "AND NOT EXISTS (SELECT FROM {surplus} d WHERE d.number = r.{number}) LIMIT 1"
        ).fetchone()
        if wrong is None and self._interceptors:
            wrong = self.execute(
                "SELECT FROM {table} s, pg_current_xact_id() x (id) WHERE CASE WHEN age(s.xmin) "
                "<= age(x.id::xid) THEN pg_xact_status((x.id::text::numeric + age(x.id::xid) - "
                "age(s.xmin))::text::xid8) = 'in progress' END AND NOT EXISTS (SELECT FROM {rows} "
                "r WHERE r.{kind} <> 'surplus' AND {same}) LIMIT 1"
            ).fetchone()
        if wrong is not None:
            raise self._not_taken()

    def left(self) -> dict[int, str]:
        """Returns the rows that were left, by number, with what refers to them.

        0 is a row of the state without number.
        """
        return dict(
            self.execute(
                "SELECT coalesce(number, 0), blocked FROM {surplus} UNION ALL SELECT {number}, "
                "{blocked} FROM {rows} WHERE {blocked} IS NOT NULL"
            ).fetchall()
        )

    def _not_taken(self) -> RepairRefused:
        generated = [name for name in self._compared if self.columns[name].is_generated]
        causes = [*self._interceptors, *(f"generated column {name}" for name in generated)]
        return RepairRefused(
            f"rows of {self.spec.state} do not take the canonical values: "
            f"{', '.join(causes) or 'a column'} gives them other values, or writes other rows. "
            f"They are unchanged. Let the canonical query of reconciliation {self.spec.name} "
            "return what the table holds, or leave the column out"
        )

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Raises ``RepairRefused`` for an error of a constraint, a trigger or a rule."""
        try:
            yield
        except psycopg.Error as error:
            passes = {ErrorKind.CONFLICT, ErrorKind.UNAVAILABLE}
            is_hidden = error.diag.source_function == "check_enable_rls"
            if classify(error) in passes or sqlstate(error) == LACKS_PRIVILEGE or is_hidden:
                raise
            raise RepairRefused(self._describe_refusal(error)) from error

    def _describe_refusal(self, error: psycopg.Error) -> str:
        """Names the constraint and its table; texts of Postgres may hold values."""
        diag, hint = error.diag, ""
        table = f"{diag.schema_name}.{diag.table_name}" if diag.table_name else self.spec.state
        if diag.constraint_name is not None:
            cause = f"constraint {diag.constraint_name} of {table}"
        elif diag.column_name is not None:
            cause = f"column {diag.column_name} of {table} ({type(error).__name__})"
        else:
            cause = ", ".join([f"{type(error).__name__} in {table}", *self._interceptors])
        if isinstance(error, (psycopg.errors.UniqueViolation, psycopg.errors.ExclusionViolation)):
            hint = ", or repair all rows in one transaction: --whole"
        return (
            f"{self.spec.state} cannot be repaired: {cause} does not allow it. These rows are "
            f"unchanged. Correct the canonical query of reconciliation {self.spec.name} or the "
            f"rows that are in the way{hint}"
        )


def _all(conditions: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(" AND ").join([sql.SQL("true"), *conditions])


def _any(conditions: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(" OR ").join([sql.SQL("false"), *conditions])


def _same(column: StateColumn) -> sql.Composable:
    """Renders the comparison of keys.

    Equality of some types and collations is coarser than the comparison's.
    """
    text: LiteralString = "s.{0} = r.{0}"
    if column.oid not in NATIVE:
        text += ' AND CAST(s.{0} AS text) COLLATE "C" = CAST(r.{0} AS text)'
    return sql.SQL(text).format(sql.Identifier(column.name))


def _differ(column: StateColumn, tolerance: float | None) -> sql.Composable:
    names = {"name": sql.Identifier(column.name), "tolerance": sql.Literal(str(tolerance))}
    if column.oid not in NATIVE:
        text: LiteralString = (
            'CAST(s.{name} AS text) COLLATE "C" IS DISTINCT FROM CAST(r.{name} AS text)'
        )
    elif tolerance is None:
        text = "s.{name} IS DISTINCT FROM r.{name}"
    else:
        text = (
            "(s.{name} IS DISTINCT FROM r.{name} AND (abs(CAST(CAST(s.{name} AS text) AS numeric) "
            "- CAST(CAST(r.{name} AS text) AS numeric)) <= CAST({tolerance} AS numeric)) IS NOT "
            "TRUE)"
        )
    return sql.SQL(text).format(**names)


def _field(column: StateColumn) -> sql.Composed:
    """Renders a column as parsed from JSON.

    A document is text there, and a whole number may have a decimal point.
    """
    type_ = "text" if column.is_json else "numeric" if column.is_integer else column.unlimited
    return sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(type_))


def _parsed(column: StateColumn) -> sql.Composed:
    value = sql.SQL("x.{}").format(sql.Identifier(column.name))
    return (
        sql.SQL("CAST({} AS {})").format(value, sql.SQL(column.unlimited))
        if column.is_json
        else value
    )


def order_states(
    connection: Connection, specs: Sequence[ReconciliationSpec]
) -> list[ReconciliationSpec]:
    """Orders reconciliations as ``order_tables``.

    The connection finds tables by the role's search_path.
    """
    tables = [
        StateTable(connection, spec, oid, ())
        for spec in specs
        for [oid] in connection.execute(
            CATALOG["find_table"], {"table": quote(spec.schema, spec.table)}
        )
        if oid is not None
    ]
    ordered = [table.spec for table in order_tables(tables)]
    return [*ordered, *(spec for spec in specs if spec not in ordered)]


def order_tables(tables: Sequence[StateTable]) -> list[StateTable]:
    """Orders tables for inserting: each after those that it refers to.

    A circle keeps the given order.
    """
    ordered: list[StateTable] = []
    remaining = list(tables)
    while remaining:
        free = (
            t
            for t in remaining
            if not any(_refers(t, other) for other in remaining if other is not t)
        )
        ordered.append(next(free, remaining[0]))
        remaining.remove(ordered[-1])
    return ordered


def _refers(table: StateTable, other: StateTable) -> bool:
    return any(reference.child in table.tree for reference in other.references)


def write_rows(
    connection: Connection, tables: Sequence[StateTable], *, is_whole: bool
) -> Mapping[int, str]:
    """Writes the rows of all tables; returns the rows that were left, by number."""
    ordered = order_tables(tables)
    connection.execute("SET CONSTRAINTS ALL DEFERRED")
    for table in ordered:
        with table.refusals():
            table.find_surplus(is_whole=is_whole)
    for table in reversed(ordered):
        with table.refusals():
            table.delete_surplus(ordered)
    for table in ordered:
        with table.refusals():
            table.write(ordered)
    for table in reversed(ordered):
        with table.refusals():
            table.delete_surplus(ordered)
    with ordered[0].refusals():
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    for table in ordered:
        table.check()
    return {number: reason for table in ordered for number, reason in table.left().items()}
