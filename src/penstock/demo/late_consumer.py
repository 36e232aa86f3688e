"""A consumer that is added later: it begins with the current tables while everything runs, and continues with the log."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from penstock import Pipeline, Record
from penstock.demo import faults
from penstock.demo.audit import LATE_CONSUMER
from penstock.demo.rides import CANONICAL_COPIES, keep_copies, ride_index, rides
from penstock.demo.rides import pipeline as first

pipeline = Pipeline([rides, ride_index], schema=first.scope.schema, namespace=first.scope.namespace)


@pipeline.consumer(reads=rides, name=LATE_CONSUMER)
def ride_late(session: Session, records: Sequence[Record]) -> None:
    """A copy of the table that has not seen the first records."""
    keep_copies(session, "late_copies", records)


@pipeline.reconciliation(of=ride_late, state="rocket_rides.late_copies", key="ride_id")
def canonical(_: object) -> str:
    """What the copy begins with."""
    return CANONICAL_COPIES


faults.install()
