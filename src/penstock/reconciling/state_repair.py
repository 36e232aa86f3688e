"""Repairs a consumer's state: the differing rows alone, or all of it together with its position.

Each is one transaction that locks the consumer's checkpoints.  Rows are repaired while the consumer is paused at a cut,
where they must be what the tables show.  A whole replacement needs no pause: state and position become those of the cut,
and the records beyond it are applied as usual.

The state's table, its operators and its triggers are the application's, and are found by the role's search_path.  All
statements that need them come last in the transaction, after those that need only our own tables.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Cursor, sql

from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import quote, statements
from penstock.database.transactions import FIX_FORMATS, OUR_SEARCH_PATH, ROLES_SEARCH_PATH
from penstock.declaring.declarations import ReconciliationSpec
from penstock.display import format_count
from penstock.errors import BarrierMissed, DeclarationError, Gap, Refused, Unknown
from penstock.observer import crashpoint
from penstock.reconciling.comparison import Difference
from penstock.reconciling.cut import Cut
from penstock.records import Offset, Scope, Shard, ShardName

BATCH_BYTES = 64 * 1024 * 1024
"""Size of the rows that are repaired at once, in bytes, in Postgres."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The SQL type of a column as it is declared, ``numeric(12,2)``, and without its limits, ``numeric``.

    A cast to the declared type may round or truncate.
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
        rows: sql.Identifier = sql.Identifier("pg_temp", "penstock_differences"),  # noqa: B008  a constant
    ) -> None:
        """Builds the statements."""
        missing = [column for column in (*spec.key, *columns) if column not in types]
        if missing:
            raise DeclarationError(
                f"reconciliation {spec.name}: {spec.state} has no column {missing[0]!r}; it has {', '.join(types)}"
            )
        self._names = _build_names(spec, columns, types, rows)
        self.delete_all = self._build("DELETE FROM {table}")
        self.insert_all = self._build("INSERT INTO {table} ({columns}) SELECT {expected} FROM {rows} d")
        # The first column that cannot hold one of its values, if there is any.
        self.find_unfit = self._build(
            "SELECT unfit.name FROM (SELECT {unfit} AS name FROM {rows} d) unfit WHERE unfit.name IS NOT NULL LIMIT 1"
        )
        note: LiteralString = (  # the current rows of each key, in a column of the differences
            "UPDATE pg_temp.penstock_differences d SET {column} = rows.found FROM ("
            'SELECT k."penstock number" AS number, CASE count(*) WHEN 1 THEN jsonb_agg(to_jsonb(s)) -> 0 ELSE jsonb_agg(to_jsonb(s)) END AS found '
            'FROM {table} s, pg_temp.penstock_keys k WHERE {same} GROUP BY k."penstock number") rows WHERE rows.number = d.number'
        )
        self.repair = (
            self._build(
                'CREATE TEMPORARY TABLE penstock_keys ON COMMIT DROP AS SELECT d.number AS "penstock number" {key_values} '
                "FROM pg_temp.penstock_differences d"
            ),
            self._build("ANALYZE pg_temp.penstock_keys"),
            self._build(note, column=sql.Identifier("before")),
            # Deletes surplus rows, and all rows of a doubled key.
            self._build(
                "DELETE FROM {table} s USING pg_temp.penstock_keys k, pg_temp.penstock_differences d "
                """WHERE {same} AND d.number = k."penstock number" AND (d.expected IS NULL OR d.kind = 'doubled')"""
            ),
            self._build(
                "UPDATE {table} s SET {set} FROM pg_temp.penstock_keys k, pg_temp.penstock_differences d "
                """WHERE {same} AND d.number = k."penstock number" AND d.kind = 'different'"""
            ),
            # A concurrent run may have inserted the row already: at the same cut, so it is the same row.
            self._build(
                "INSERT INTO {table} ({columns}) SELECT {expected} FROM pg_temp.penstock_differences d "
                "WHERE d.kind IN ('missing', 'doubled') AND d.expected IS NOT NULL AND NOT EXISTS ("
                """SELECT FROM {table} s, pg_temp.penstock_keys k WHERE {same} AND k."penstock number" = d.number)"""
            ),
            self._build(note, column=sql.Identifier("after")),
        )

    def _build(self, text: LiteralString, **more: sql.Composable) -> sql.Composed:
        return sql.SQL(text).format(**self._names, **more)


def _build_names(
    spec: ReconciliationSpec, columns: Sequence[str], types: Mapping[str, ColumnType], rows: sql.Identifier
) -> dict[str, sql.Composable]:
    """The parts of the statements that depend on the table."""

    def value(row: LiteralString, column: str) -> sql.Composed:
        return sql.SQL("CAST({} ->> {} AS {})").format(
            sql.SQL(row), sql.Literal(column), sql.SQL(types[column].declared)
        )

    everything, match = (*spec.key, *columns), sql.SQL("s.{0} = k.{0}")
    return {
        "table": sql.Identifier(*filter(None, (spec.schema, spec.table))),
        # Rows of two tables have the same key; always, without a key.
        "same": sql.SQL(" AND ").join([sql.SQL("true"), *(match.format(sql.Identifier(c)) for c in spec.key)]),
        "set": sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(column), value("d.expected", column))
            for column in columns or spec.key  # rows of nothing but a key do not differ
        ),
        "columns": sql.SQL(", ").join(map(sql.Identifier, everything)),
        "rows": rows,
        "expected": sql.SQL(", ").join(value("d.expected", column) for column in everything),
        "unfit": _find_unfit(everything, types),
        "key_values": sql.SQL("").join(
            sql.SQL(", {} AS {}").format(value("d.key", column), sql.Identifier(column)) for column in spec.key
        ),
    }


def _find_unfit(columns: Sequence[str], types: Mapping[str, ColumnType]) -> sql.Composable:
    """The name of a column whose type would round or truncate the value of a row; NULL if there is none."""
    cases = [
        sql.SQL("WHEN {value} IS DISTINCT FROM CAST({value} AS {declared}) THEN {column}").format(
            value=sql.SQL("CAST(d.expected ->> {} AS {})").format(
                sql.Literal(column), sql.SQL(types[column].unlimited)
            ),
            declared=sql.SQL(types[column].declared),
            column=sql.Literal(column),
        )
        for column in columns
        if types[column].declared != types[column].unlimited
    ]
    return sql.SQL("CASE {} END").format(sql.SQL(" ").join(cases)) if cases else sql.SQL("NULL")


@dataclass(frozen=True, slots=True)
class CanonicalRows:
    """Canonical rows, each as JSON, and their columns besides the key."""

    columns: tuple[str, ...]
    rows: Iterable[str]


def choose_batch(connection: Connection, scope: Scope, spec: ReconciliationSpec, most: int) -> int:
    """Number of keys whose rows are repaired at once: fewer of large rows, which pass through memory as JSON."""
    state = _State(connection, scope, spec)
    with postgres_errors(f"repairing {spec.state}"), connection.transaction():
        found = state.execute("row_bytes", table=state.find_table()).fetchone()
    size = 0 if found is None else int(found[0] or 0)
    return max(1, min(most, BATCH_BYTES // max(1, size)))


def repair_rows(  # noqa: PLR0913, PLR0917  what a repair needs
    connection: Connection,
    scope: Scope,
    spec: ReconciliationSpec,
    at: Cut,
    differences: Sequence[Difference],
    columns: Sequence[str],
    run: int,
) -> int:
    """Repairs the rows of some keys, of a consumer paused at a cut; returns the number of keys."""
    state = _State(connection, scope, spec)
    with postgres_errors(f"repairing {spec.state}"), connection.transaction():
        connection.execute(FIX_FORMATS)
        types = state.read_types()
        repair = RepairStatements(spec, columns, types)
        checkpoints = state.lock_checkpoints()
        if any(offset != at.get_offset(shard) for shard, offset in checkpoints.items()):
            raise BarrierMissed(
                f"consumer {spec.consumer.name} is no longer at the cut: nothing was changed. Try again"
            )
        state.refuse_dead_letters(checkpoints, at)
        state.execute("differences")
        columns_of_differences = "COPY pg_temp.penstock_differences (number, kind, key, expected) FROM STDIN"
        with connection.cursor().copy(columns_of_differences) as copy:
            for number, each in enumerate(differences):
                copy.write_row((number, each.kind, each.key, each.expected))
        connection.execute(ROLES_SEARCH_PATH)
        state.refuse_unfit(types, repair.find_unfit)
        for statement in repair.repair:
            connection.execute(statement)
        state.execute("note_repairs", run=run)
        crashpoint("repair.before_commit")
    crashpoint("repair.after_commit")
    return len(differences)


def replace_state(
    connection: Connection, scope: Scope, at: Cut, tables: Sequence[tuple[ReconciliationSpec, CanonicalRows]]
) -> int:
    """Replaces a consumer's whole state by canonical rows, and its checkpoints by their cut; returns the number of rows."""
    states = [(_State(connection, scope, spec), rows) for spec, rows in tables]
    state, _ = states[0]
    written = 0
    with postgres_errors(f"replacing the state of {state.spec.consumer.name}"), connection.transaction():
        connection.execute(FIX_FORMATS)
        copied = [each.copy_rows(number, rows) for number, (each, rows) in enumerate(states)]
        # Retention takes the same lock: it cannot remove what the checkpoints move back to.
        connection.execute(statements("penstock.database", scope.schema)["lock_channel"], {"channel": state.channel})
        positions = state.name_positions(state.lock_checkpoints(), at)
        state.check_kept(at)
        state.execute("put_checkpoints", **positions, epoch=at.epoch)
        state.execute("drop_dead_letters", **positions)
        connection.execute(ROLES_SEARCH_PATH)
        for table in copied:
            connection.execute(table.delete_all)
            written += connection.execute(table.insert_all).rowcount
        crashpoint("replace.before_commit")
    crashpoint("replace.after_commit")
    return written


class _State:
    """One table of a consumer's state, and the consumer's position, in a transaction of a connection."""

    def __init__(self, connection: Connection, scope: Scope, spec: ReconciliationSpec) -> None:
        self._connection, self.spec, self.channel = connection, spec, spec.consumer.channel.name
        self._sql = statements("penstock.reconciling", scope.schema)

    def execute(self, statement: str, **values: Any) -> Cursor[Any]:
        return self._connection.execute(self._sql[statement], values or None)

    def copy_rows(self, number: int, rows: CanonicalRows) -> RepairStatements:
        """Copies the table's rows into a temporary one, before anything is locked; returns the statements over it."""
        incoming = sql.Identifier("pg_temp", f"penstock_incoming_{number}")
        types = self.read_types()
        table = RepairStatements(self.spec, rows.columns, types, incoming)
        self._connection.execute(
            sql.SQL("CREATE TEMPORARY TABLE {} (expected jsonb NOT NULL) ON COMMIT DROP").format(
                sql.Identifier(f"penstock_incoming_{number}")
            )
        )
        with self._connection.cursor().copy(sql.SQL("COPY {} FROM STDIN").format(incoming)) as copy:
            for row in rows.rows:
                copy.write_row((row,))
        self.refuse_unfit(types, table.find_unfit)
        return table

    def refuse_unfit(self, types: Mapping[str, ColumnType], find_unfit: sql.Composed) -> None:
        """Refuses canonical values that the state's columns would round or truncate: every run would find them again."""
        unfit = self._connection.execute(find_unfit).fetchone()
        if unfit is not None:
            raise Refused(
                f"column {unfit[0]!r} of {self.spec.state}, {types[unfit[0]].declared}, cannot hold a canonical value without rounding "
                f"or truncating it. Nothing was changed. Alter the column, or round in the canonical query of reconciliation "
                f"{self.spec.name}"
            )

    def lock_checkpoints(self) -> Mapping[ShardName, Offset]:
        """Locks the consumer's checkpoints: it applies nothing until this transaction ends."""
        rows = self.execute("lock_checkpoints", consumer=self.spec.consumer.name, channel=self.channel)
        return {ShardName(self.channel, Shard(shard)): Offset(offset) for shard, offset in rows}

    def check_kept(self, at: Cut) -> None:
        """Checks that the records after the cut are still there."""
        for shard, first in self.execute("journal_begins", channel=self.channel):
            name = ShardName(self.channel, Shard(shard))
            if first > at.get_offset(name) + 1:
                raise Gap(
                    f"{name}: the cut is at offset {at.get_offset(name)}, the journal now begins at {first}: the records between were "
                    "removed while the canonical rows were computed. Nothing was changed; try again, and keep records longer (Log.keep)"
                )

    def refuse_dead_letters(self, shards: Collection[ShardName], at: Cut) -> None:
        """A dead letter is a known difference: repaired here and retried later, its record would be applied twice."""
        [(count,)] = self.execute("dead_letters_before", **self.name_positions(shards, at))
        if count:
            name = self.spec.consumer.name
            raise Refused(
                f"consumer {name} has dead-lettered {format_count(count, 'record')} that the canonical rows include. First retry them, and drop "
                f"those that are left, which the repair makes up for: penstock dead-letters retry {name} --all, and penstock "
                f"dead-letters drop {name} --all --apply; or replace the whole state, which drops them: --whole"
            )

    def name_positions(self, shards: Collection[ShardName], at: Cut) -> dict[str, str | list[int]]:
        """The parameters of a statement about the positions of the cut."""
        return {
            "consumer": self.spec.consumer.name,
            "channel": self.channel,
            "shards": [int(shard.shard) for shard in shards],
            "offsets": [int(at.get_offset(shard)) for shard in shards],
        }

    def read_types(self) -> Mapping[str, ColumnType]:
        """The columns of the state table, and their SQL types."""
        rows = self.execute("column_types", table=self.find_table()).fetchall()
        if not rows:
            raise Unknown(f"reconciliation {self.spec.name}: there is no table {self.spec.state}")
        return {name: ColumnType(declared, unlimited) for name, declared, unlimited in rows}

    def find_table(self) -> int | None:
        """The state's table, by the role's search_path, which is ours again afterwards; None if there is none."""
        self._connection.execute(ROLES_SEARCH_PATH)
        [(oid,)] = self.execute("find_table", table=quote(self.spec.schema, self.spec.table)).fetchall()
        self._connection.execute(OUR_SEARCH_PATH)
        return None if oid is None else int(oid)
