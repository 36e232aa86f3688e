"""Litestar with asynchronous sessions, and the console as part of the application.

litestar --app litestar_app:app run                              the application
penstock run --app litestar_app:pipeline --engine inline         streamer and consumers
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from litestar import Litestar, asgi, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromQuery
from litestar.types import Receive, Scope, Send
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from starlette.requests import Request

from penstock import Log, Pipeline, Record
from penstock.console import Visitor, make_console

DATABASE_URL = os.environ.get("PENSTOCK_DATABASE_URL", "postgresql:///shop")
REDIS_URL = os.environ.get("PENSTOCK_REDIS_URL", "redis://127.0.0.1:6379/0")


class Base(DeclarativeBase):
    """The base of the application's tables."""


class Table(Base):
    """A table that somebody has booked."""

    __tablename__ = "booked_tables"
    id: Mapped[int] = mapped_column(primary_key=True)
    seats: Mapped[int]


class Shift(Base):
    """What follows from a booking: how many seats somebody waits on."""

    __tablename__ = "shifts"
    table_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    seats: Mapped[int]


Sessions = async_sessionmaker(expire_on_commit=False)
tables = Log("tables")
pipeline = Pipeline([tables])
pipeline.stages(Table, to=tables, key="id")
pipeline.attach(Sessions)


@pipeline.consumer(reads=tables)
async def shifts(session: AsyncSession, records: Sequence[Record]) -> None:
    """Keeps a row for each booked table."""
    for record in records:
        if record.action != "delete":
            await session.merge(Shift(table_id=record.data["id"], seats=record.data["seats"]))


async def begin() -> AsyncIterator[AsyncSession]:
    """A session in a transaction: the booking and its record, or neither."""
    async with Sessions.begin() as session:
        yield session


@post("/tables", dependencies={"session": Provide(begin)})
async def book(seats: FromQuery[int], session: NamedDependency[AsyncSession]) -> dict[str, int]:
    """Books a table."""
    table = Table(seats=seats)
    session.add(table)
    await session.flush()
    return {"id": table.id}


def allow(request: Request) -> Visitor | None:
    """Who may see the console: here whom your own middleware has let in as an operator."""
    name = request.scope.get("state", {}).get("operator")
    return Visitor(name, frozenset({"see", "keys"})) if name else None


_console = make_console(pipeline, DATABASE_URL, REDIS_URL, access=allow)


@asgi("/console", is_mount=True, copy_scope=True)
async def console(scope: Scope, receive: Receive, send: Send) -> None:
    """The console's pages."""
    await _console(scope, receive, send)  # type: ignore[arg-type]  # ASGI, as Starlette types it


@asynccontextmanager
async def lifespan(_: Litestar) -> AsyncIterator[None]:
    """Binds sessions to the engine while the application runs."""
    engine = create_async_engine(DATABASE_URL.replace("postgresql:", "postgresql+psycopg:", 1))
    Sessions.configure(bind=engine)
    yield
    await engine.dispose()
    _console.close()


app = Litestar([book, console], lifespan=[lifespan])
