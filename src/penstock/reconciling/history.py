"""Rows of runs: the last one of each reconciliation, and the keys that an interrupted repair has still to look at.

A list of keys may be old without harm, because every key on it is compared again, at a new cut, before its row is repaired.
It belongs to one run: the run that goes on takes it over.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from penstock.database.connections import Connection
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import statements
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import Refused
from penstock.reconciling.cut import Connect
from penstock.records import Scope


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last run of a reconciliation."""

    name: str  # name of the reconciliation
    consumer: str  # the consumer whose state it compares
    intent: str  # ``compare``, ``repair``, ``replace`` or ``bootstrap``
    # ``equal``, ``differs``, ``repaired``, ``replaced``, the name of an error, or ``running``, which a killed run keeps
    outcome: str
    begun_at: datetime  # its start
    ago_s: float  # time since its start, in seconds
    seconds: float | None  # its duration, in seconds; None if it has not ended
    compared: int | None  # number of keys compared; None if it compared nothing
    differences: int | None  # number of keys that differed; None if it compared nothing
    repaired: int  # number of rows repaired, or of rows in the new state
    paused_s: float | None  # pause of the consumer for the comparison, in seconds
    remaining: int  # number of keys that an interrupted repair left, for ``--resume``


def last_runs(connection: Connection, scope: Scope) -> tuple[LastRun, ...]:
    """The last run of each reconciliation, ordered by name."""
    with connection.cursor(row_factory=class_row(LastRun)) as cursor:
        return tuple(cursor.execute(statements("penstock.reconciling", scope.schema)["last_runs"], binary=True))


@dataclass(frozen=True, slots=True)
class Remaining:
    """The number of an interrupted run, and the keys that it left, each as JSON."""

    run: int
    keys: Sequence[str]


@dataclass(frozen=True)
class RemainingKeys:
    """The list of one run, on connections to the primary."""

    connect: Connect
    scope: Scope
    run: int

    def keep(self, name: str, keys: Sequence[str]) -> None:
        """Writes the list, and removes those of earlier runs of the reconciliation: this one has compared every key since."""
        with postgres_errors("keeping the keys to repair"), self.connect() as connection:
            connection.execute(self._sql["keep_remaining"], {"run": self.run, "name": name, "keys": list(keys)})

    def drop(self, keys: Sequence[str], repaired: int) -> None:
        """Removes keys that need no repair any more, and records how many the run has repaired."""
        with postgres_errors("keeping the keys to repair"), self.connect() as connection:
            connection.execute(self._sql["drop_remaining"], {"run": self.run, "keys": list(keys), "repaired": repaired})

    def take_over(self, spec: ReconciliationSpec, engine: str) -> Remaining | None:
        """The list of the last run of a reconciliation that was interrupted; None if there is none."""
        with postgres_errors("taking over the keys to repair"), self.connect() as connection, connection.transaction():
            found = connection.execute(
                self._sql["take_over_remaining"], {"name": spec.name, "run": self.run}
            ).fetchone()
            if found is None:
                return None
            number, written_by, keys = found
            _check_fits(spec, engine, written_by, keys)
        return Remaining(number, keys)

    @property
    def _sql(self) -> dict[str, bytes]:
        return statements("penstock.reconciling", self.scope.schema)


def _check_fits(spec: ReconciliationSpec, engine: str, written_by: str, keys: Sequence[str]) -> None:
    """Engines write some keys differently: one would not find those of the other, and take them for equal."""
    if written_by != engine:
        raise Refused(
            f"reconciliation {spec.name}: the interrupted run was on the engine {written_by}, this one is on {engine}. "
            f"Resume it with --engine {written_by}, or compare everything again: without --resume"
        )
    if keys and set(json.loads(keys[0], parse_int=str)) != set(spec.key):
        raise Refused(
            f"reconciliation {spec.name}: its key is another one since the run that was interrupted. "
            "Compare everything again: without --resume"
        )
