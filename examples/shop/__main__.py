"""Books, changes and cancels rides in the database of a ``penstock run`` that was started in this directory."""

import os
import sys
from pathlib import Path

from sqlalchemy import create_engine

from shop.models import Base, Ride, SessionLocal

STARTED = Path(".penstock/postgres/url")


def main() -> None:
    """A hundred rides, of which some change."""
    url = os.environ.get("PENSTOCK_DATABASE_URL") or STARTED.read_text().strip()
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:", 1))
    Base.metadata.create_all(engine)
    SessionLocal.configure(bind=engine)
    with SessionLocal.begin() as session:
        rides = [Ride(account=f"account-{n % 7}", fare=100 * n) for n in range(1, 101)]
        session.add_all(rides)
    with SessionLocal.begin() as session:
        for ride in rides[::10]:
            session.merge(ride).fare += 50
        session.delete(session.merge(rides[-1]))
    sys.stdout.write("100 rides booked, 10 changed, 1 cancelled\n")


main()
