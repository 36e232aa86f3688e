"""Drift: what goes wrong behind Penstock's back, and the reconciliation that finds and mends it, under traffic.

Two of the planted kinds are a hand that slips in a consumer's table.  The third is what outboxes are feared for: an
application that changes its table and, for a while, tells nobody.
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
from penstock.database.connections import Connection, make_engine
from penstock.demo.processes import end, last_words, leashed
from penstock.demo.rides import Ride, pipeline, ride_index

CHANGED, DELETED, INVENTED, UNTOLD = 5, 4, 3, 3
"""Rows of the copy that are changed, deleted and invented; rides that are changed without a record."""

_QUIET = """
SELECT r.id
FROM rocket_rides_log.staged_records s
JOIN rocket_rides.rides r ON r.id::text = s.key
LEFT JOIN (SELECT record_id, count(*) AS times FROM rocket_rides.effects GROUP BY record_id) e ON e.record_id = s.id
WHERE s.channel = 'rides'
  AND r.id < (SELECT max(id) - 60 FROM rocket_rides.rides)  -- nobody has it at hand any more
GROUP BY r.id
HAVING min(coalesce(e.times, 0)) = 2
ORDER BY r.id
LIMIT %(count)s
"""
"""The oldest rides whose every record has taken effect in both consumers."""

_PLANT = (
    "UPDATE rocket_rides.copies SET amount_cents = amount_cents + 1 WHERE ride_id = ANY (%s)",
    "DELETE FROM rocket_rides.copies WHERE ride_id = ANY (%s)",
    "UPDATE rocket_rides.rides SET amount_cents = amount_cents + 500 WHERE id = ANY (%s)",
)


@dataclass(frozen=True, slots=True)
class Drift:
    """What was planted in the copy and the total, and what became of it.

    Attributes:
        planted: Rows that were made to differ.
        found: Rows that the reconciliations found, and no others were there to be found.
        mended: Rows that they mended.
    """

    planted: int = 0
    found: int = 0
    mended: int = 0

    @property
    def gone(self) -> bool:
        """All that was planted was found and mended."""
        return self.planted == self.found == self.mended


def plant(connection: Connection, *, all_of_it: bool) -> int:
    """Makes copy, total and index differ from the table; gives the number of rows that a reconciliation should find.

    Args:
        connection: To the demo's database.
        all_of_it: Plants nothing, and gives 0, as long as too few rides are quiet; else there may be less of it.
    """
    wanted = CHANGED + DELETED + UNTOLD
    with connection.transaction():
        rides = [ride for (ride,) in connection.execute(_QUIET, {"count": wanted})]
        if all_of_it and len(rides) < wanted:
            return 0
        parts = rides[:CHANGED], rides[CHANGED : CHANGED + DELETED], rides[CHANGED + DELETED :]
        rows = sum(
            connection.execute(statement.encode(), (part,)).rowcount
            for statement, part in zip(_PLANT, parts, strict=True)
        )
        connection.execute(
            "INSERT INTO rocket_rides.copies SELECT -n, n FROM generate_series(1, %s) n",
            (INVENTED,),
        )
    return rows + INVENTED + bool(parts[2])  # the total differs too, if a ride does


class Reconciling:
    """``penstock reconcile --apply`` in a process of its own.

    Attributes:
        drift: What was found; None as long as it runs.
        failure: Why it could not compare.
    """

    def __init__(self, planted: int, environment: Mapping[str, str]) -> None:
        self.drift: Drift | None = None
        self.failure: str | None = None
        self._planted, self._environment = planted, environment
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run, name="reconciling", daemon=True).start()

    def _run(self) -> None:
        command = ["penstock", "reconcile", "--apply", "--json"]
        command += ["--app", "penstock.demo.rides:pipeline"]
        with tempfile.TemporaryFile() as words, tempfile.TemporaryFile() as answer:
            self._process = leashed(command, self._environment, words, answer)
            code = self._process.wait()
            if code:
                self.failure = (
                    f"penstock reconcile ended with exit code {code}\n{last_words(words)}"
                )
                return
            answer.seek(0)
            runs = json.load(answer)
        self.drift = Drift(
            self._planted,
            sum(sum(run["differences"].values()) for run in runs),
            sum(run["repaired"] for run in runs),
        )

    def end(self, patience_s: float) -> None:
        """Ends it, if it still runs: with SIGKILL after ``patience_s`` seconds."""
        end(self._process, patience_s)


def mark_all_dirty(database_url: str) -> None:
    """An index that has missed a mark is made anew by marking everything: it reads the tables as they are."""
    engine = make_engine(database_url, application="demo")
    sessions = sessionmaker(engine)
    pipeline.attach(sessions)
    with sessions.begin() as session:
        mark_dirty(session, ride_index, session.scalars(select(Ride.id)))
    engine.dispose()
