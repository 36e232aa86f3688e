"""What the last runs found: the metrics of a nightly reconciliation."""

from dataclasses import dataclass
from datetime import datetime

from penstock.database.connections import Connection
from penstock.database.statements import DEFAULT_SCHEMA, statements


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last run of a reconciliation.

    Attributes:
        name: Of the reconciliation.
        consumer: Whose state it was about.
        intent: ``compare``, ``mend``, ``replace`` or ``bootstrap``.
        outcome: ``equal``, ``differs``, ``mended``, ``replaced``, the name of an error, or ``running``: so too for one that was killed.
        begun_at: When it began.
        ago_s: How long ago that was, in seconds.
        seconds: How long it took; None if it has not ended.
        compared: Keys that were compared; None if it did not compare.
        differences: Keys that differed; None if it did not compare.
        repaired: Rows that were mended, or put in the place of all.
        paused_s: How long the consumer stood still to be looked at, in seconds.
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


def last_runs(connection: Connection, schema: str = DEFAULT_SCHEMA) -> tuple[LastRun, ...]:
    """The last run of each reconciliation, by name.

    Raises:
        psycopg.Error: Postgres does not answer.
    """
    rows = connection.execute(statements("penstock.reconciling", schema)["last_runs"])
    return tuple(LastRun(*row) for row in rows)
