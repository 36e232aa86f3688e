"""The last run of each reconciliation, for ``penstock status``."""

from dataclasses import dataclass
from datetime import datetime

from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.records import Scope


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last run of a reconciliation.

    Attributes:
        name: Name of the reconciliation.
        consumer: The consumer whose state it compares.
        intent: ``compare``, ``repair``, ``replace`` or ``bootstrap``.
        outcome: ``equal``, ``differs``, ``repaired``, ``replaced``, the name of an error, or ``running``, which a killed run
            keeps.
        begun_at: When it began.
        ago_s: How long ago that was, in seconds.
        seconds: How long it took; None if it has not ended.
        compared: Number of keys compared; None if it compared nothing.
        differences: Number of keys that differed; None if it compared nothing.
        repaired: Number of rows repaired, or of rows in the new state.
        paused_s: How long the consumer was paused for the comparison, in seconds.
        remaining: Number of keys that an interrupted repair left, for ``--resume``.
    """

    name: str
    consumer: str
    intent: str
    outcome: str
    begun_at: datetime
    ago_s: float
    seconds: float | None
    compared: int | None
    differences: int | None
    repaired: int
    paused_s: float | None
    remaining: int


def last_runs(connection: Connection, scope: Scope) -> tuple[LastRun, ...]:
    """The last run of each reconciliation, ordered by name.

    Raises:
        psycopg.Error: Postgres does not answer.
    """
    rows = connection.execute(statements("penstock.reconciling", scope.schema)["last_runs"], binary=True)
    return tuple(LastRun(*row) for row in rows)
