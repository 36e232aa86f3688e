"""A consumer that comes later: it begins with the tables as they are, while everything runs, and goes on with the log."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from penstock import Pipeline, Record
from penstock.demo import mischief
from penstock.demo.rides import CANONICAL_COPIES, keep_copies, ride_index, rides
from penstock.demo.rides import pipeline as first
from penstock.demo.verdict import NEWCOMER

pipeline = Pipeline([rides, ride_index], schema=first.schema, namespace=first.namespace)


@pipeline.consumer(reads=rides, name=NEWCOMER)
def ride_newcomer(session: Session, records: Sequence[Record]) -> None:
    """A copy of the table, that has not seen its beginning."""
    keep_copies(session, "newcomers", records)


@pipeline.reconciliation(of=ride_newcomer, state="rocket_rides.newcomers", key="ride_id")
def canonical(_: object) -> str:
    """What the copy begins with."""
    return CANONICAL_COPIES


mischief.begin()
