"""A consumer that is added later: it begins with the current tables while everything runs, and continues with the log."""

import os
import threading
from collections.abc import Sequence

from sqlalchemy.orm import Session

from penstock import Pipeline, Record
from penstock.database.connections import connect_postgres
from penstock.database.errors import describe
from penstock.demo import faults
from penstock.demo.audit import LATE_CONSUMER
from penstock.demo.rides import CANONICAL_COPIES, keep_copies, ride_index, rides
from penstock.demo.rides import pipeline as first
from penstock.reconciling import reconcile
from penstock.reconciling.inline_comparer import InlineComparer

pipeline = Pipeline([rides, ride_index], schema=first.scope.schema, namespace=first.scope.namespace)


@pipeline.consumer(reads=rides, name=LATE_CONSUMER)
def ride_late(session: Session, records: Sequence[Record]) -> None:
    """A copy of the table that has not seen the first records."""
    keep_copies(session, "late_copies", records)


@pipeline.reconciliation(of=ride_late, state="rocket_rides.late_copies", key="ride_id")
def canonical(_: object) -> str:
    """What the copy begins with."""
    return CANONICAL_COPIES


def has_begun() -> bool:
    """Whether the consumer has begun with the tables."""
    with connect_postgres(os.environ["PENSTOCK_DATABASE_URL"], application="demo") as connection:
        found = connection.execute(
            "SELECT FROM rocket_rides_log.checkpoints WHERE consumer = %s LIMIT 1", (LATE_CONSUMER,)
        )
        return found.rowcount > 0


class Beginning:
    """Begins with the tables, in a thread: what ``penstock consume --from tables`` does before it consumes.

    Attributes:
        failure: Why it failed; None unless it has.
    """

    def __init__(self, database_url: str) -> None:
        """Starts it."""
        self.failure: str | None = None
        self._database_url = database_url
        threading.Thread(target=self._run, name="beginning", daemon=True).start()

    def _run(self) -> None:
        [spec] = pipeline.reconciliations.values()
        try:
            reconcile(
                lambda: connect_postgres(self._database_url, application="demo", prepare=False),
                pipeline.scope,
                spec,
                InlineComparer(self._database_url),
                intent="bootstrap",
            )
        except Exception as error:  # noqa: BLE001  shown by the demo, which ends
            self.failure = f"{LATE_CONSUMER} could not begin with the tables: {describe(error)}"

    def end(self, _timeout_s: float) -> None:
        """It ends with the demo."""


faults.install()
