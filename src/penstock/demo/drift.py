"""Drift: rows changed behind Penstock's back, found and repaired by reconciliation under traffic.

Two of the three kinds are manual changes to a consumer's table.  The third is an application that
changes its table and stages nothing.
"""

import json
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import sessionmaker

from penstock import mark_dirty
from penstock.database.connections import Connection, connect_postgres, make_engine
from penstock.database.driver_errors import describe
from penstock.demo.rides import LATE_CONSUMER, Ride, late_pipeline, pipeline, ride_index
from penstock.demo.supervision import end, last_lines, start_child
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import reconcile

CHANGED, DELETED, INVENTED, UNSTAGED = 5, 4, 3, 3
"""Rows of the copy that are changed, deleted and invented, and rides changed without a record."""

_SETTLED_RIDES = """
SELECT r.id
FROM rocket_rides_log.staged_records s
JOIN rocket_rides.rides r ON r.id::text = s.key
LEFT JOIN (SELECT record_id, count(*) AS times FROM rocket_rides.effects GROUP BY record_id) e ON e.record_id = s.id
WHERE s.channel = 'rides'
  AND r.id < (SELECT max(id) - 60 FROM rocket_rides.rides)  -- clients no longer change it
GROUP BY r.id
HAVING min(coalesce(e.times, 0)) = 2
ORDER BY r.id
LIMIT %(count)s
"""  # noqa: E501  SQL
"""The oldest rides whose records have all taken effect in both consumers."""

_SEED = (
    "UPDATE rocket_rides.copies SET amount_cents = amount_cents + 1 WHERE ride_id = ANY (%s)",
    "DELETE FROM rocket_rides.copies WHERE ride_id = ANY (%s)",
    "UPDATE rocket_rides.rides SET amount_cents = amount_cents + 500 WHERE id = ANY (%s)",
)


@dataclass(frozen=True, slots=True)
class Drift:
    """The drift in the copy and the total, and the rows that the reconciliations found."""

    seeded: int = 0
    found: int = 0
    repaired: int = 0


def seed_drift(connection: Connection, *, wait_for_all: bool) -> int:
    """Makes copy, total and index differ from the table.

    Returns the number of rows a reconciliation should find.
    """
    count = CHANGED + DELETED + UNSTAGED
    with connection.transaction():
        rides = [ride for (ride,) in connection.execute(_SETTLED_RIDES, {"count": count})]
        if wait_for_all and len(rides) < count:
            return 0
        parts = rides[:CHANGED], rides[CHANGED : CHANGED + DELETED], rides[CHANGED + DELETED :]
        rows = sum(
            connection.execute(statement.encode(), (part,)).rowcount
            for statement, part in zip(_SEED, parts, strict=True)
        )
        connection.execute(
            "INSERT INTO rocket_rides.copies SELECT -n, n FROM generate_series(1, %s) n",
            (INVENTED,),
        )
    return rows + INVENTED + bool(parts[2])  # if a ride differs, the total differs, too


class ReconcileProcess:
    """``penstock reconcile --apply`` in a process of its own.

    The drift it found, None while it runs, or its failure.
    """

    def __init__(self, seeded: int, environment: Mapping[str, str]) -> None:
        """Starts it; ``seeded`` is the number of rows it should find."""
        self.drift: Drift | None = None
        self.failure: str | None = None
        self._seeded, self._environment = seeded, environment
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run, name="reconciling", daemon=True).start()

    def _run(self) -> None:
        command = ["penstock", "reconcile", "--apply", "--json"]
        command += ["--app", "penstock.demo.rides:pipeline"]
        with tempfile.TemporaryFile() as stderr, tempfile.TemporaryFile() as stdout:
            self._process = start_child(command, self._environment, stderr, stdout)
            code = self._process.wait()
            if code:
                self.failure = (
                    f"penstock reconcile ended with exit code {code}\n{last_lines(stderr)}"
                )
                return
            stdout.seek(0)
            runs = json.load(stdout)
        self.drift = Drift(
            self._seeded,
            sum(sum(run["differences"].values()) for run in runs),
            sum(run["repaired"] for run in runs),
        )

    def end(self, timeout_s: float) -> None:
        """Stops it if it still runs: with SIGTERM, and with SIGKILL after ``timeout_s`` seconds."""
        end(self._process, timeout_s)


def mark_all_dirty(database_url: str) -> None:
    """Marks every ride, so that the index catches up with changes that were never marked."""
    engine = make_engine(database_url, application="demo")
    sessions = sessionmaker(engine)
    pipeline.attach(sessions)
    with sessions.begin() as session:
        mark_dirty(session, to=ride_index, members=session.scalars(select(Ride.id)))
    engine.dispose()


class Beginning:
    """Begins with the tables, in a thread.

    What ``penstock consume --from tables`` does before it consumes.
    """

    def __init__(self, database_url: str) -> None:
        """Starts it."""
        self.failure: str | None = None
        self._database_url = database_url
        threading.Thread(target=self._run, name="beginning", daemon=True).start()

    def _run(self) -> None:
        [spec] = late_pipeline.reconciliations.values()
        try:
            reconcile(
                lambda: connect_postgres(self._database_url, application="demo", prepare=False),
                late_pipeline.scope,
                spec,
                InlineComparer(self._database_url),
                intent="bootstrap",
            )
        except Exception as error:  # noqa: BLE001  shown by the demo, which ends
            self.failure = f"{LATE_CONSUMER} could not begin with the tables: {describe(error)}"

    def end(self, _timeout_s: float) -> None:
        """Does nothing: the thread ends with the demo."""
