"""FastAPI with asynchronous sessions: a request stages, a worker elsewhere applies, and the console is part of the application.

uvicorn fastapi_app:app                                    the application
penstock run --app fastapi_app:pipeline --engine inline    streamer and consumers
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from starlette.requests import Request

from penstock import Log, Pipeline, Record
from penstock.console import Visitor, make_console

DATABASE_URL = os.environ.get("PENSTOCK_DATABASE_URL", "postgresql:///shop")
REDIS_URL = os.environ.get("PENSTOCK_REDIS_URL", "redis://127.0.0.1:6379/0")


class Base(DeclarativeBase):
    """The base of the application's tables."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int]


class Invoice(Base):
    """What follows from an order."""

    __tablename__ = "invoices"
    order_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    cents: Mapped[int]


Session = async_sessionmaker(expire_on_commit=False)
orders = Log("orders")
pipeline = Pipeline([orders])
pipeline.stages(Order, to=orders, key="id")
pipeline.attach(Session)


@pipeline.consumer(reads=orders)
async def invoices(session: AsyncSession, records: Sequence[Record]) -> None:
    """Writes an invoice for each order; its transaction also carries the checkpoint."""
    for record in records:
        if record.action == "insert":
            await session.merge(Invoice(order_id=record.data["id"], cents=record.data["cents"]))


def make_engine() -> AsyncEngine:
    """The application's engine; asyncpg does as well."""
    return create_async_engine(DATABASE_URL.replace("postgresql:", "postgresql+psycopg:", 1))


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Binds sessions to the engine while the application runs."""
    engine = make_engine()
    Session.configure(bind=engine)
    yield
    await engine.dispose()
    console.close()


async def begin() -> AsyncIterator[AsyncSession]:
    """A session in a transaction, which is committed before the response: the order and its record, or neither."""
    async with Session.begin() as session:
        yield session


def allow(request: Request) -> Visitor | None:
    """Who may see the console: here whom your own middleware has let in as an operator."""
    name = request.scope.get("state", {}).get("operator")
    return Visitor(name, frozenset({"see", "keys"})) if name else None


app = FastAPI(lifespan=lifespan)
console = make_console(pipeline, DATABASE_URL, REDIS_URL, access=allow)
app.mount("/console", console)


@app.post("/orders", status_code=201)
async def create_order(
    cents: int, session: Annotated[AsyncSession, Depends(begin, scope="function")]
) -> dict[str, int]:
    """Takes an order."""
    order = Order(cents=cents)
    session.add(order)
    await session.flush()
    return {"id": order.id}
