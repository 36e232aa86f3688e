"""The captured tables as they are now, compared with those that the triggers were installed for.

DDL that an application runs later does not tell Penstock: the types of columns, the labels of
enums, partitions and children change under an installed trigger.  The catalog has all of it, and
every role may read it.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.database.statements import quote
from penstock.database.store import Store
from penstock.staging.trigger_tables import FIRST
from penstock.staging.triggers import Trigger

INIT = "penstock init"

TABLES = {"r", "p"}
KINDS = {"v": "a view", "m": "a materialised view", "f": "a foreign table"}
"""Of ``pg_class.relkind``: relations that triggers capture, and names of some that they do not."""


@dataclass(frozen=True, slots=True)
class CaptureFault:
    """A declared trigger that does not capture what its rule says, or one without a rule."""

    message: str  # the finding
    fix: str  # the command, or the change
    # true if workers refuse to start: a rule's changes are lost, or staged in another form than
    # declared
    is_refused: bool = True
    is_mended_by_init: bool = True


class InstalledTrigger(NamedTuple):
    """A function that captures changes, with one of its triggers."""

    name: str  # of the function
    body: str  # the function's body
    trigger: str | None  # name of the trigger; None if the function has none, like all that follow
    oid: int | None  # of the trigger's table
    schema: str | None  # schema of the trigger's table
    table: str | None  # name of the trigger's table
    type: int | None  # ``pg_trigger.tgtype``
    fires: (
        bool | None
        # true if it fires for every change of its type: enabled, for all columns, without a
        # condition
    )
    comment: str | None  # what the table was like when it was installed


class Column(NamedTuple):
    """A column of a captured table."""

    type: str
    is_virtual: bool  # generated when it is read
    labels: list[str] | None  # of an enum


class PartTable(NamedTuple):
    """A partition of a captured table, or a table that inherits from it, directly or not."""

    oid: int
    name: str
    kind: str  # ``pg_class.relkind``
    is_partition: bool
    disabled: list[str]  # names of triggers that it has of its parent, and that do not fire


@dataclass(frozen=True, slots=True)
class CapturedTable:
    """A table with the name of a rule's table."""

    oid: int
    schema: str
    name: str
    kind: str  # ``pg_class.relkind``
    is_unlogged: bool
    columns: dict[str, Column]
    parts: tuple[PartTable, ...]
    others: tuple[str, ...]  # triggers AFTER changes of rows, ours among them

    @property
    def full_name(self) -> str:
        """Quoted name with its schema."""
        return quote(self.schema, self.name)


def read_installed(store: Store) -> list[InstalledTrigger]:
    """Reads all functions that capture, with their triggers."""
    rows = store.rows("triggers", {"schema": store.scope.schema}, doing="reading the triggers")
    return [InstalledTrigger(*row) for row in rows]


def read_tables(store: Store, names: Collection[str]) -> list[CapturedTable]:
    """Reads all tables that have one of the names."""
    values = {"tables": list(names)}
    rows = store.rows("captured_tables", values, doing="reading the captured tables")
    return [
        CapturedTable(
            oid=oid,
            schema=schema,
            name=name,
            kind=kind,
            is_unlogged=is_unlogged,
            columns={column: Column(*facts) for column, facts in columns.items()},
            parts=tuple(PartTable(*part) for part in parts),
            others=tuple(others),
        )
        for oid, schema, name, kind, is_unlogged, columns, parts, others in rows
    ]


def missing_column(table: str, name: str) -> CaptureFault:
    """A column that was dropped or renamed, which a trigger still reads."""
    return CaptureFault(
        f"table {table} has no column {name}, which its trigger reads: writes fail",
        f"change the class or the rule, then: {INIT}",
    )


def find_refusals(trigger: Trigger, table: CapturedTable) -> Iterator[CaptureFault]:
    """Finds the reasons why a trigger cannot capture a table, whatever is installed."""
    for kind, name in (
        (table.kind, table.full_name),
        *((part.kind, part.name) for part in table.parts),
    ):
        if kind not in TABLES:
            yield CaptureFault(
                f"{name} is {KINDS.get(kind, 'no table')}: what changes its rows does not fire a "
                "trigger here",
                "declare the rule for the tables behind it, in the database that holds them",
                is_mended_by_init=False,
            )
    for name in dict.fromkeys((*trigger.expressions, *sorted(trigger.others))):
        column = table.columns.get(name)
        if column is None:
            yield missing_column(table.full_name, name)
        elif column.is_virtual:
            yield CaptureFault(
                f"column {name} of table {table.full_name} is a virtual generated column, which "
                "is NULL in a trigger",
                f"make it STORED, or list the other columns in data; then: {INIT}",
            )


def find_changes(
    trigger: Trigger, table: CapturedTable, installed: Sequence[InstalledTrigger]
) -> Iterator[CaptureFault]:
    """Finds what has changed since the trigger was installed, and what its order depends on."""
    row, truncate = FIRST + trigger.name, f"{trigger.name}_truncate"
    firing = {(candidate.oid, candidate.trigger) for candidate in installed if candidate.fires}
    for part in table.parts:
        if not part.is_partition and (part.oid, row) not in firing:
            yield CaptureFault(
                f"{part.name} inherits from table {table.full_name}, and has no trigger {row}", INIT
            )
        elif truncate in trigger.types and (part.oid, truncate) not in firing:
            message = (
                f"TRUNCATE of {part.name}, a part of table {table.full_name}, would remove "
                "rows without records"
            )
            yield CaptureFault(message, INIT, is_refused=False)
        if row in part.disabled:
            yield CaptureFault(
                f"trigger {row} of {part.name}, a partition of table {table.full_name}, is "
                "disabled",
                f"ALTER TABLE {part.name} ENABLE TRIGGER {quote(row)}, or {INIT}",
            )
    comment = next(
        candidate.comment
        for candidate in installed
        if (candidate.oid, candidate.trigger) == (table.oid, row)
    )
    yield from _compare(trigger, table, _parse(comment))
    for name, labels in trigger.labels.items():
        column = table.columns.get(name)
        for label in sorted(set((column and column.labels) or ()) - labels):
            yield CaptureFault(
                f"column {name} of table {table.full_name} has the label {label!r}, which the "
                f"class {trigger.rule.model.__name__} lacks: its records have the label itself",
                f"add it to the class, then: {INIT}",
                is_refused=False,
                is_mended_by_init=False,
            )
    if table.kind == "p" and "update" in trigger.rule.on and "insert" not in trigger.rule.on:
        yield CaptureFault(
            f"an UPDATE that moves a row to another partition of table {table.full_name} is a "
            f"DELETE and an INSERT to triggers, and the rule of {trigger.rule.model.__name__} "
            "stages no inserts",
            'add "insert" to its on, unless no such UPDATE is made',
            is_refused=False,
            is_mended_by_init=False,
        )
    yield from _warn(table, row)


def _compare(
    trigger: Trigger, table: CapturedTable, recorded: dict[str, object]
) -> Iterator[CaptureFault]:
    """Compares columns and parts with those that the trigger's comment lists."""
    columns, parts = recorded.get("columns"), recorded.get("parts")
    if not isinstance(columns, dict) or not isinstance(parts, list):
        message = (
            f"trigger {FIRST}{trigger.name} of table {table.full_name} has lost the comment "
            "that says what it reads"
        )
        yield CaptureFault(message, INIT, is_refused=False)
        return
    for name, column in table.columns.items():
        if name in trigger.expressions.keys() | trigger.others and column.type != columns.get(name):
            yield CaptureFault(
                f"column {name} of table {table.full_name} is of type {column.type}; its trigger "
                f"was installed for {columns.get(name)}, and stages what it reads now",
                f"check that the consumers take it, then: {INIT}",
                is_refused=False,
            )
    names = {part.name for part in table.parts}
    for name in sorted(set(parts) - names):
        yield CaptureFault(
            f"{name} is no longer a part of table {table.full_name}: its rows left without records",
            f"penstock reconcile, then: {INIT}",
            is_refused=False,
        )
    for name in sorted(names - set(parts)):
        yield CaptureFault(
            f"{name} has become a part of table {table.full_name}: rows that it had then came "
            "without records",
            f"if it had rows: penstock reconcile; then: {INIT}",
            is_refused=False,
        )


def _warn(table: CapturedTable, row: str) -> Iterator[CaptureFault]:
    for name in table.others:
        if name.encode() < row.encode():
            yield CaptureFault(
                f"trigger {name} of table {table.full_name} fires before {row}: if it changes the "
                "row again, the record of that comes first",
                f"give it a name that sorts after {FIRST!r}: ALTER TRIGGER {quote(name)} ON "
                f"{table.full_name} RENAME TO …",
                is_refused=False,
                is_mended_by_init=False,
            )
    if table.is_unlogged:
        yield CaptureFault(
            f"table {table.full_name} is unlogged: after a crash of Postgres it is empty, and no "
            "record says so",
            f"ALTER TABLE {table.full_name} SET LOGGED",
            is_refused=False,
            is_mended_by_init=False,
        )


def is_of_former_name(trigger: Trigger, installed: InstalledTrigger, table: CapturedTable) -> bool:
    """Returns whether a trigger captures the table under a former name, for the rule's channel."""
    captures = _parse(installed.comment).get("captures")
    if installed.oid != table.oid or not isinstance(captures, list):
        return False
    name, channel = captures
    return bool(name != table.name and channel == trigger.rule.channel.name)


def _parse(comment: str | None) -> dict[str, object]:
    try:
        parsed = json.loads(comment or "{}")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
