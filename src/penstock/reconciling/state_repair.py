"""Repairs a consumer's state: the differing rows alone, or all of it together with its position.

Each is one transaction that locks the consumer's checkpoints, and changes no row that is right.
Rows are repaired while the consumer is paused at a cut, where they must be what the tables show.  A
whole replacement needs no pause: state and position become those of the cut, and the records beyond
it are applied as usual.

The state's table, its operators and its triggers are the application's, and are found by the role's
search_path.  All statements that need them come last in the transaction, after those that need only
our own tables.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import sql

from penstock.crash_points import crashpoint
from penstock.database.executor import StatementResult
from penstock.database.statements import quote
from penstock.database.store import Store
from penstock.database.transactions import FIX_FORMATS, OUR_SEARCH_PATH, ROLES_SEARCH_PATH
from penstock.declaring.declarations import ReconciliationSpec
from penstock.display import format_count
from penstock.errors import BarrierMissed, Gap, Refused, RepairRefused, Unknown
from penstock.reconciling.comparison import Difference
from penstock.reconciling.cut import Cut
from penstock.reconciling.state_table import StateTable, write_rows
from penstock.records import Offset, Shard, ShardName

BATCH_BYTES = 64 * 1024 * 1024
"""Size of the rows that are repaired at once, in bytes, in Postgres."""


@dataclass(frozen=True, slots=True)
class CanonicalRows:
    """Canonical rows, each as JSON, and their columns besides the key."""

    columns: tuple[str, ...]
    rows: Iterable[str]


def choose_batch(store: Store, spec: ReconciliationSpec, max_keys: int) -> int:
    """Chooses how many keys are repaired at once.

    Fewer if rows are large, as they pass through memory as JSON.
    """
    state = _State(store, spec)
    with store.transaction(f"repairing {spec.state}", is_own=False):
        row = state.execute("row_bytes", table=state.find_table()).fetchone()
    size = 0 if row is None else int(row[0] or 0)
    return max(1, min(max_keys, BATCH_BYTES // max(1, size)))


def repair_rows(
    store: Store,
    spec: ReconciliationSpec,
    point: Cut,
    differences: Sequence[Difference],
    columns: Sequence[str],
    run: int,
) -> Mapping[str, str]:
    """Repairs the rows of some keys of a consumer paused at a cut.

    Returns the unrepaired keys, and what refers to them.  Raises ``RepairRefused`` for the
    constraint that does not allow it.
    """
    state = _State(store, spec)
    with store.transaction(f"repairing {spec.state}", is_own=False):
        store.connection.execute(FIX_FORMATS)
        table = state.open_table(columns)
        checkpoints = state.lock_positions()
        if any(offset != point.get_offset(shard) for shard, offset in checkpoints.items()):
            raise BarrierMissed(
                f"consumer {spec.consumer.name} is no longer at the cut: nothing was changed. Try "
                "again"
            )
        state.refuse_dead_letters(checkpoints, point)
        state.execute("differences")
        columns_of_differences = (
            "COPY pg_temp.penstock_differences (number, kind, key, expected) FROM STDIN"
        )
        with store.connection.cursor().copy(columns_of_differences) as copy:
            for number, difference in enumerate(differences):
                copy.write_row((number, difference.kind, difference.key, difference.expected))
        store.connection.execute(ROLES_SEARCH_PATH)
        table.parse_rows(_DIFFERENCES)
        with table.refusals():  # not even a document that Postgres cannot write into the history
            table.execute(_NOTE, column=sql.Identifier("before"))
        unrepaired = write_rows(store.connection, [table], is_whole=False)
        table.execute(_NOTE, column=sql.Identifier("after"))
        state.execute("note_repairs", run=run, left=list(unrepaired))
        crashpoint("repair.before_commit")
    crashpoint("repair.after_commit")
    return {differences[number].key: reason for number, reason in unrepaired.items()}


_DIFFERENCES = sql.SQL(
    "(SELECT number, kind, coalesce(expected, key) AS row FROM pg_temp.penstock_differences)"
)
_NOTE: LiteralString = (  # the current rows of each key, in a column of the differences
    "UPDATE pg_temp.penstock_differences d SET {column} = rows.found FROM ("
    "SELECT r.{number} AS number, CASE count(*) WHEN 1 THEN jsonb_agg(to_jsonb(s.*)) -> 0 ELSE "
    "jsonb_agg(to_jsonb(s.*)) END AS found FROM {table} s JOIN {rows} r ON {same} GROUP BY "
    "r.{number}) rows WHERE rows.number = d.number"
)


def replace_state(
    store: Store, point: Cut, tables: Sequence[tuple[ReconciliationSpec, CanonicalRows]]
) -> int:
    """Replaces a consumer's whole state by the canonical rows, and its checkpoints by their cut.

    Returns the number of rows.

    Rows that are right already stay as they are.  Raises ``RepairRefused`` for the constraint that
    does not allow it.
    """
    states = [(_State(store, spec), rows) for spec, rows in tables]
    state, _ = states[0]
    with store.transaction(f"replacing the state of {state.spec.consumer.name}", is_own=False):
        store.connection.execute(FIX_FORMATS)
        opened = [
            member.open_table(rows.columns, number) for number, (member, rows) in enumerate(states)
        ]
        written = sum(
            member.copy_rows(number, rows) for number, (member, rows) in enumerate(states)
        )
        store.connection.execute(ROLES_SEARCH_PATH)
        for number, table in enumerate(opened):
            table.parse_rows(_INCOMING.format(_incoming(number)))
            table.check_keys()
        store.connection.execute(OUR_SEARCH_PATH)
        # Retention takes the same lock: it cannot remove what the checkpoints move back to.
        store.execute("lock_channel", {"channel": state.channel})
        positions = state.name_positions(state.lock_positions(), point)
        state.check_kept(point)
        state.execute("put_checkpoints", **positions, epoch=point.epoch)
        state.execute("drop_dead_letters", **positions)
        store.connection.execute(ROLES_SEARCH_PATH)
        for table in opened:
            table.mark_doubled()
        for reason in write_rows(store.connection, opened, is_whole=True).values():
            raise left_over([spec for spec, _ in tables], [reason], "Nothing was changed")
        crashpoint("replace.before_commit")
    crashpoint("replace.after_commit")
    return written


_INCOMING = sql.SQL(
    "(SELECT row_number() OVER () AS number, 'row' AS kind, expected AS row FROM {})"
)


def _incoming(number: int) -> sql.Identifier:
    return sql.Identifier("pg_temp", f"penstock_incoming_{number}")


def left_over(
    specs: Iterable[ReconciliationSpec], reasons: Iterable[str], outcome: str
) -> RepairRefused:
    """Makes the error for rows that were left because other rows refer to them."""
    return RepairRefused(
        f"rows of {', '.join(spec.state for spec in specs)} would be deleted or changed, and other "
        f"rows refer to them: {', '.join(sorted(set(reasons)))}. {outcome}. Repair or remove the "
        "rows that refer to them, and repeat it"
    )


class _State:
    """One table of a consumer's state, and the consumer's position, in one transaction."""

    def __init__(self, store: Store, spec: ReconciliationSpec) -> None:
        self._store, self.spec, self.channel = store, spec, spec.consumer.channel.name

    def execute(self, statement: str, **values: Any) -> StatementResult:
        return self._store.execute(statement, values or None)

    def open_table(self, columns: Sequence[str], number: int = 0) -> StateTable:
        """Opens the state's table.  Raises ``Unknown`` if there is none."""
        table = self.find_table()
        if table is None:
            raise Unknown(f"reconciliation {self.spec.name}: there is no table {self.spec.state}")
        [(is_view,)] = self._store.connection.execute(
            "SELECT relkind IN ('v', 'm') FROM pg_class WHERE oid = %s", (table,)
        )
        if is_view:
            raise RepairRefused(
                f"{self.spec.state} is a view, which is compared, and cannot be repaired. Nothing "
                f"was changed. Let state of reconciliation {self.spec.name} be the table that the "
                "consumer writes"
            )
        return StateTable(self._store.connection, self.spec, table, columns, number)

    def copy_rows(self, number: int, rows: CanonicalRows) -> int:
        """Copies the table's rows into a temporary one, before anything is locked.

        Returns their number.
        """
        name = sql.Identifier(f"penstock_incoming_{number}")
        create = sql.SQL("CREATE TEMPORARY TABLE {} (expected jsonb NOT NULL) ON COMMIT DROP")
        self._store.connection.execute(create.format(name))
        cursor = self._store.connection.cursor()
        with cursor.copy(sql.SQL("COPY {} FROM STDIN").format(_incoming(number))) as copy:
            for row in rows.rows:
                copy.write_row((row,))
        return cursor.rowcount

    def lock_positions(self) -> Mapping[ShardName, Offset]:
        """Locks the consumer's checkpoints: it applies nothing until this transaction ends."""
        rows = self.execute(
            "lock_positions", consumer=self.spec.consumer.name, channel=self.channel
        )
        return {ShardName(self.channel, Shard(shard)): Offset(offset) for shard, offset in rows}

    def check_kept(self, point: Cut) -> None:
        """Checks that the records after the cut are still there."""
        for shard, first in self.execute("first_offsets", channel=self.channel):
            name = ShardName(self.channel, Shard(shard))
            if first > point.get_offset(name) + 1:
                raise Gap(
                    f"{name}: the cut is at offset {point.get_offset(name)}, the journal now "
                    f"begins at {first}: the records between were removed while the canonical "
                    "rows were computed. Nothing was changed; try again, and keep records longer "
                    "(Log.keep)"
                )

    def refuse_dead_letters(self, shards: Collection[ShardName], point: Cut) -> None:
        """Refuses dead letters before the cut.

        Repaired here and retried later, a record would be applied twice.
        """
        [(count,)] = self.execute("dead_letters_before", **self.name_positions(shards, point))
        if count:
            name = self.spec.consumer.name
            raise Refused(
                f"consumer {name} has dead-lettered {format_count(count, 'record')} that the "
                "canonical rows include. First retry them, and drop those that are left, which "
                f"the repair makes up for: penstock dead-letters retry {name} --all, and penstock "
                f"dead-letters drop {name} --all --apply; or replace the whole state, which drops "
                "them: --whole"
            )

    def name_positions(
        self, shards: Collection[ShardName], point: Cut
    ) -> dict[str, str | list[int]]:
        """Returns the parameters of statements about the positions of the cut."""
        return {
            "consumer": self.spec.consumer.name,
            "channel": self.channel,
            "shards": [int(shard.shard) for shard in shards],
            "offsets": [int(point.get_offset(shard)) for shard in shards],
        }

    def find_table(self) -> int | None:
        """Finds the state's table by the role's search_path, then restores ours.

        None if there is none.
        """
        self._store.connection.execute(ROLES_SEARCH_PATH)
        [(oid,)] = self.execute(
            "find_table", table=quote(self.spec.schema, self.spec.table)
        ).fetchall()
        self._store.connection.execute(OUR_SEARCH_PATH)
        return None if oid is None else int(oid)
