"""The tables: rides, and what the consumers make of them."""

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker


class Base(DeclarativeBase):
    """The base of the application's tables."""


class Ride(Base):
    """A ride that was booked, until it is cancelled."""

    __tablename__ = "rides"

    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str]
    fare: Mapped[int]
    paid: Mapped[bool] = mapped_column(default=True)


class RideTotal(Base):
    """The fare of each ride, as ``ride_totals`` keeps it."""

    __tablename__ = "ride_totals"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    fare: Mapped[int]


class RideCopy(Base):
    """The same, as ``ride_copies`` keeps it, and a reconciliation compares it."""

    __tablename__ = "ride_copies"

    ride_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    fare: Mapped[int]


class ReportLine(Base):
    """What has happened, a line for each record: the effect of ``ride_report``."""

    __tablename__ = "ride_report"

    record_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    words: Mapped[str]


class IndexedRide(Base):
    """What one can search for: the copy of ``index_rides``."""

    __tablename__ = "indexed_rides"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    words: Mapped[str]


class Receipt(Base):
    """A receipt that was sent: the effect of ``send_receipt``."""

    __tablename__ = "receipts"

    ride_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


SessionLocal = sessionmaker()
