"""SQLModel: its sessions stage what they change; a handler writes models of SQLModel with the worker's session.

penstock run --app sqlmodel_app:pipeline --engine inline
"""

import os
from collections.abc import Sequence

import sqlmodel
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from sqlmodel import Field, SQLModel, create_engine

from penstock import Log, Pipeline, Record

DATABASE_URL = os.environ.get("PENSTOCK_DATABASE_URL", "postgresql:///shop")


class Rider(SQLModel, table=True):
    """A rider."""

    id: int | None = Field(default=None, primary_key=True)
    name: str


class Greeting(SQLModel, table=True):
    """What follows from a rider: a text to send."""

    rider_id: int = Field(primary_key=True)
    text: str


riders = Log("riders")
pipeline = Pipeline([riders])
pipeline.stages(Rider, to=riders, key="id")
pipeline.attach(sqlmodel.Session)  # every session of SQLModel in this process


@pipeline.consumer(reads=riders)
def greetings(session: Session, records: Sequence[Record]) -> None:
    """Keeps a greeting for each rider, with the name that the rider has now."""
    for record in records:
        if record.action != "delete":
            session.merge(Greeting(rider_id=record.data["id"], text=f"Hello, {record.data['name']}!"))
        elif greeting := session.get(Greeting, record.data["id"]):
            session.delete(greeting)


def make_engine() -> Engine:
    """The application's engine."""
    return create_engine(DATABASE_URL.replace("postgresql:", "postgresql+psycopg:", 1))
