"""The application: rides, staged to a log with two consumers, and marked in an Ick with a third.

Each booking is a job in a queue, whose tenants are the drivers: one of them has more than half of
the bookings.  Its faults are installed in every process that imports it, if the environment asks
for them.  The crashes are real: the process exits at once, between effect and checkpoint.
"""

import os
import random
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, ClassVar

from sqlalchemy import BigInteger, Identity, MetaData, Text, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import Ick, Job, Log, Pipeline, Queue, Record
from penstock.crash_points import install_crashpoint, install_repeats

SCHEMA = "rocket_rides"
rides = Log("rides", shards=4, keep=timedelta(days=1))
ride_index = Ick("ride_index", shards=2, keep=timedelta(days=1))
receipts = Queue("ride-receipts", streams=8, hand=2)
pipeline = Pipeline(
    [rides, ride_index, receipts], schema="rocket_rides_log", namespace="rocket_rides"
)


class Base(DeclarativeBase):
    """The base of the application's tables, in a schema of their own."""

    metadata = MetaData(schema=SCHEMA)


class Ride(Base):
    """A ride and its price; ``delta_cents`` is the effect of the last change on the total."""

    __tablename__ = "rides"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    amount_cents: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(Text, default="paid")
    delta_cents: ClassVar[int] = 0

    def charge(self, cents: int) -> None:
        """Sets the price."""
        self.delta_cents = cents - (self.amount_cents or 0)  # type: ignore[misc]  # an instance's own
        self.amount_cents = cents


class Booking(Base):
    """A ride when it is booked: its driver gets a receipt, even if the ride is cancelled later."""

    __tablename__ = "bookings"

    ride_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    driver: Mapped[str] = mapped_column(Text)


FLOODING = "driver-0"
"""The driver who has more than half of the bookings."""


def assign_driver() -> str:
    """Draws a driver for a ride."""
    dice = random.random()  # noqa: S311  not for secrets
    return FLOODING if dice < 0.6 else f"driver-{1 + int(dice * 1000) % 40}"  # noqa: PLR2004


def _data(ride: Ride) -> dict[str, Any]:
    return {
        "id": ride.id,
        "amount_cents": ride.amount_cents,
        "delta_cents": ride.delta_cents,
        "status": ride.status,
    }


pipeline.stages(Ride, to=rides, key="id", data=_data)
pipeline.marks_dirty(Ride, to=ride_index, key="id")
pipeline.stages(Booking, to=receipts, on="insert", tenant="driver", data=["ride_id"])

CONSUMER_TABLES = """
CREATE TABLE rocket_rides.totals (consumer text PRIMARY KEY, total_cents bigint NOT NULL);
INSERT INTO rocket_rides.totals VALUES ('ride_totals', 0);
CREATE TABLE rocket_rides.copies (ride_id bigint PRIMARY KEY, amount_cents bigint NOT NULL);
CREATE TABLE rocket_rides.late_copies (ride_id bigint PRIMARY KEY, amount_cents bigint NOT NULL);
CREATE TABLE rocket_rides.ride_index (ride_id bigint PRIMARY KEY, amount_cents bigint NOT NULL, words tsvector NOT NULL);
CREATE VIEW rocket_rides.indexable AS
SELECT id AS ride_id, amount_cents,
       to_tsvector('simple', concat_ws(' ', 'ride', id, status, amount_cents / 100, 'dollars')) AS words
FROM rocket_rides.rides;
-- No primary key: a receipt that is sent twice has two rows.
CREATE TABLE rocket_rides.receipts (ride_id bigint NOT NULL, driver text NOT NULL);
-- No primary key: a record that takes effect twice has two rows.
CREATE TABLE rocket_rides.effects (consumer text NOT NULL, record_id bigint NOT NULL, shard int NOT NULL,
                                   "offset" bigint NOT NULL, latency_us bigint NOT NULL,
                                   number bigint GENERATED ALWAYS AS IDENTITY);
CREATE TABLE rocket_rides.faults (kind text NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp());
"""  # noqa: E501  SQL

_NOTE_EFFECTS = text(
    """
    INSERT INTO rocket_rides.effects
    SELECT :consumer, id, shard, "offset", (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - staged_us
    FROM unnest(:ids, :shards, :offsets, :staged) AS r (id, shard, "offset", staged_us)
    """  # noqa: E501  SQL
).bindparams(
    *(bindparam(name, type_=ARRAY(BigInteger)) for name in ("ids", "shards", "offsets", "staged"))
)

_KEEP_COPIES = """
WITH given AS (
    SELECT * FROM unnest(:ids, :amounts) AS r (ride_id, amount_cents)
),
gone AS (
    DELETE FROM rocket_rides.{table}
    WHERE ride_id IN (SELECT ride_id FROM given WHERE amount_cents IS NULL)
)
INSERT INTO rocket_rides.{table}
SELECT * FROM given WHERE amount_cents IS NOT NULL
ON CONFLICT (ride_id) DO UPDATE SET amount_cents = excluded.amount_cents
"""

CANONICAL_COPIES = "SELECT id AS ride_id, amount_cents FROM rocket_rides.rides"

_INDEX = text(
    """
    WITH gone AS (
        DELETE FROM rocket_rides.ride_index
        WHERE ride_id = ANY (:ids) AND NOT EXISTS (SELECT FROM rocket_rides.rides WHERE id = ride_id)
    )
    INSERT INTO rocket_rides.ride_index
    SELECT * FROM rocket_rides.indexable WHERE ride_id = ANY (:ids)
    ON CONFLICT (ride_id) DO UPDATE SET amount_cents = excluded.amount_cents, words = excluded.words
    """  # noqa: E501  SQL
).bindparams(bindparam("ids", type_=ARRAY(BigInteger)))


def _note_effects(session: Session, consumer: str, records: Sequence[Record]) -> None:
    session.execute(
        _NOTE_EFFECTS,
        {
            "consumer": consumer,
            "ids": [record.id for record in records],
            "shards": [record.shard for record in records],
            "offsets": [record.offset for record in records],
            "staged": [record.staged_us for record in records],
        },
    )


def keep_copies(session: Session, table: str, records: Sequence[Record]) -> None:
    """Updates a copy of the table with the newest record of each ride."""
    newest = {
        r.data["id"]: r.data["amount_cents"] if r.action != "delete" else None for r in records
    }
    session.execute(
        text(_KEEP_COPIES.format(table=table)).bindparams(
            *(bindparam(name, type_=ARRAY(BigInteger)) for name in ("ids", "amounts"))
        ),
        {"ids": list(newest), "amounts": list(newest.values())},
    )


@pipeline.consumer(reads=rides)
def ride_totals(session: Session, records: Sequence[Record]) -> None:
    """Keeps a running total, which shows any record that is lost, doubled or invented."""
    _note_effects(session, "ride_totals", records)
    session.execute(
        text(
            "UPDATE rocket_rides.totals SET total_cents = total_cents + :delta WHERE consumer = "
            "'ride_totals'"
        ),
        {"delta": sum(record.data["delta_cents"] for record in records)},
    )


@pipeline.consumer(reads=rides)
def ride_copies(session: Session, records: Sequence[Record]) -> None:
    """Keeps a copy of the table, which shows any record that is out of order."""
    _note_effects(session, "ride_copies", records)
    keep_copies(session, "copies", records)


@pipeline.consumer(reads=ride_index, name="ride_index")
def index_rides(session: Session, members: Sequence[str]) -> None:
    """Keeps a search index from the ids of dirty rides, which shows any mark that is lost."""
    session.execute(_INDEX, {"ids": [int(member) for member in members]})


@pipeline.worker(reads=receipts, lease=5.0)
def send_receipts(session: Session, job: Job) -> None:
    """Writes a receipt for each booking, which shows any job that is lost or done twice."""
    session.execute(
        text("INSERT INTO rocket_rides.receipts VALUES (:ride_id, :driver)"),
        {"ride_id": job.data["ride_id"], "driver": job.tenant},
    )


@pipeline.reconciliation(
    of=ride_totals, state="rocket_rides.totals", key="consumer", columns=["total_cents"]
)
def canonical_total(_: object) -> str:
    """Returns the correct total."""
    return (
        "SELECT 'ride_totals' AS consumer, coalesce(sum(amount_cents), 0)::bigint AS "
        "total_cents FROM rocket_rides.rides"
    )


@pipeline.reconciliation(of=ride_copies, state="rocket_rides.copies", key="ride_id")
def canonical_copies(_: object) -> str:
    """Returns the correct copy."""
    return CANONICAL_COPIES


LATE_CONSUMER = "ride-late"
"""The consumer that is added later.

It begins with the current tables, and continues with the log.
"""

late_pipeline = Pipeline(
    [rides, ride_index], schema=pipeline.scope.schema, namespace=pipeline.scope.namespace
)


@late_pipeline.consumer(reads=rides, name=LATE_CONSUMER)
def ride_late(session: Session, records: Sequence[Record]) -> None:
    """Keeps a copy of the table without having seen the first records."""
    keep_copies(session, "late_copies", records)


@late_pipeline.reconciliation(of=ride_late, state="rocket_rides.late_copies", key="ride_id")
def canonical_late(_: object) -> str:
    """Returns the rows with which the late copy begins."""
    return CANONICAL_COPIES


CRASH_EVERY = "PENSTOCK_DEMO_CRASH_EVERY"
"""Environment variable: average time between two crashes of a process, in seconds."""

REPEAT_CHANCE = "PENSTOCK_DEMO_REPEAT_CHANCE"
"""Environment variable: probability that a streamer, or a consumer, repeats its last records."""

APPLIED = (
    "consumer.after_apply",
    "together.after_apply",
    "members.after_apply",
    "jobs.after_apply",
)
"""Crash points between the effects and the checkpoint."""

CRASHED = 70
"""Exit code of a process that crashed on purpose."""


def _install_faults() -> None:
    """Installs the faults that the environment asks for."""
    if chance := float(os.environ.get(REPEAT_CHANCE, "0")):
        install_repeats(lambda point: _repeats(point, chance))
    if seconds := float(os.environ.get(CRASH_EVERY, "0")):
        _install_crashes(seconds)


def _repeats(point: str, chance: float) -> bool:
    repeats = random.random() < chance  # noqa: S311  not for secrets
    if repeats and point == "streamer.after_publish":
        _record("resent")
    return repeats


def _install_crashes(seconds: float) -> None:
    lifetime = seconds * random.uniform(0.5, 1.5)  # noqa: S311  not for secrets
    first: list[float] = []

    def crash(point: str) -> None:
        if point in APPLIED:
            first.append(monotonic()) if not first else None
            if monotonic() - first[0] > lifetime:
                _record("crash")
                os._exit(CRASHED)

    install_crashpoint(crash)


def _record(kind: str) -> None:
    """Records a fault on a connection of its own, so that it survives the crash."""
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  an application that stages needs no psycopg

    with connect_postgres(os.environ["PENSTOCK_DATABASE_URL"], application="faults") as connection:
        connection.execute("INSERT INTO rocket_rides.faults (kind) VALUES (%s)", (kind,))


_install_faults()
