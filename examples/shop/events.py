"""The pipeline: a log of rides with three consumers, an Ick with a search index, and a queue of receipts."""

from collections.abc import Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from penstock import Cancel, Ick, Job, Log, Pipeline, Queue, Record, Snooze
from shop.models import IndexedRide, Receipt, ReportLine, Ride, RideCopy, RideTotal, SessionLocal

rides = Log("rides", shards=4)
rides_trial = Log("rides-trial", shards=4)  # for replays
ride_index = Ick("ride_index", shards=2)
receipts = Queue("receipts")

pipeline = Pipeline(channels=[rides, rides_trial, ride_index, receipts])
pipeline.stages(Ride, to=rides, key="id", data=["id", "fare"])
pipeline.stages(
    Ride, to=receipts, on="insert", tenant="account", data=lambda ride: {"ride_id": ride.id, "paid": ride.paid}
)
pipeline.marks_dirty(Ride, to=ride_index, key="id")
pipeline.attach(SessionLocal)


@pipeline.consumer(reads=rides)
def ride_totals(session: Session, records: Sequence[Record]) -> None:
    """The fare of each ride."""
    for record in records:
        ride = record.data
        if record.action == "delete":
            session.execute(delete(RideTotal).filter_by(id=ride["id"]))
        else:
            session.merge(RideTotal(id=ride["id"], fare=ride["fare"]))


@pipeline.consumer(reads=rides)
def ride_copies(session: Session, records: Sequence[Record]) -> None:
    """A copy of the table, which a reconciliation compares with it."""
    for record in records:
        ride = record.data
        if record.action == "delete":
            session.execute(delete(RideCopy).filter_by(ride_id=ride["id"]))
        else:
            session.merge(RideCopy(ride_id=ride["id"], fare=ride["fare"]))


@pipeline.reconciliation(of=ride_copies, state=RideCopy, key="ride_id")
def canonical(_: object) -> str:
    """What the copy should hold."""
    return "SELECT id AS ride_id, fare FROM public.rides"


@pipeline.consumer(reads=rides, each=True)
def ride_report(session: Session, record: Record) -> None:
    """A line for everything that happens, also if the record comes again."""
    words = f"{record.action} of ride {record.key}"
    session.merge(ReportLine(record_id=record.id, words=words))


@pipeline.consumer(reads=ride_index)
def index_rides(session: Session, members: Sequence[str]) -> None:
    """Looks the rides up as they are now; one that is gone leaves the index."""
    ids = [int(member) for member in members]
    session.execute(delete(IndexedRide).where(IndexedRide.id.in_(ids)))
    for ride in session.scalars(select(Ride).where(Ride.id.in_(ids))):
        session.add(IndexedRide(id=ride.id, words=f"ride {ride.id} {ride.fare}"))


@pipeline.worker(reads=receipts)
def send_receipt(session: Session, job: Job) -> Snooze | Cancel | None:
    """A receipt for a ride that was paid; one that was cancelled gets none."""
    if session.get(Ride, job.data["ride_id"]) is None:
        return Cancel("the ride was cancelled")
    if not job.data["paid"]:
        return Snooze("10m")
    session.merge(Receipt(ride_id=job.data["ride_id"]))
    return None
