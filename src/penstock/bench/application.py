"""The application that is measured: accounts that move, told to a channel, summed up by consumers.

``pipeline_of`` has a pipeline for each number of shards; ``one``, ``four`` and ``keeping_nothing`` are there for
``--app``.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, MetaData, Text, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import Log, Pipeline, Record

SCHEMA = "bench"
CHANNEL = "movements"
BULK, EACH = "totals", "totals-each"

TABLES = """
CREATE SCHEMA bench;
CREATE TABLE bench.movements (id bigint PRIMARY KEY, account bigint NOT NULL, cents bigint NOT NULL, note text NOT NULL);
CREATE TABLE bench.totals (account bigint PRIMARY KEY, movements bigint NOT NULL, cents bigint NOT NULL)
    WITH (fillfactor = 50);
"""

_ADD_EACH = text("""
    INSERT INTO bench.totals AS t (account, movements, cents) VALUES (:account, 1, :cents)
    ON CONFLICT (account) DO UPDATE SET movements = t.movements + 1, cents = t.cents + excluded.cents
""")

_ADD_ALL = text("""
    INSERT INTO bench.totals AS t (account, movements, cents)
    SELECT * FROM unnest(:accounts, :movements, :cents)
    ON CONFLICT (account) DO UPDATE SET movements = t.movements + excluded.movements, cents = t.cents + excluded.cents
""").bindparams(
    *(bindparam(name, type_=ARRAY(BigInteger)) for name in ("accounts", "movements", "cents"))
)


AROUND_A_NOTE = 55
"""Bytes of a payload without its note."""

NOTE = "x" * (200 - AROUND_A_NOTE)

Handler = Callable[..., None]
"""Of a consumer: given a session and a record, or records."""


class Base(DeclarativeBase):
    """The application's tables are in a schema of their own."""

    metadata = MetaData(schema=SCHEMA)


class Movement(Base):
    """Money that moves on an account."""

    __tablename__ = "movements"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    account: Mapped[int] = mapped_column(BigInteger)
    cents: Mapped[int] = mapped_column(BigInteger)
    note: Mapped[str] = mapped_column(Text)


def total_in_bulk(session: Session, records: Sequence[Record]) -> None:
    """Adds a batch up, and writes one statement."""
    movements: dict[int, int] = defaultdict(int)
    cents: dict[int, int] = defaultdict(int)
    for record in records:
        data: dict[str, Any] = record.data
        movements[data["account"]] += 1
        cents[data["account"]] += data["cents"]
    # In one order, so that two shards that meet the same accounts wait for each other, and do not deadlock.
    accounts = sorted(movements)
    session.execute(
        _ADD_ALL,
        {
            "accounts": accounts,
            "movements": [movements[a] for a in accounts],
            "cents": [cents[a] for a in accounts],
        },
    )


def total_each(session: Session, record: Record) -> None:
    """Writes one statement a record."""
    session.execute(_ADD_EACH, {"account": record.data["account"], "cents": record.data["cents"]})


def pipeline_with(shards: int, around: Callable[[Handler], Handler]) -> Pipeline:
    """A pipeline with so many shards, its rules and its consumers, and something around their handlers."""
    channel = Log(CHANNEL, shards=shards, keep=timedelta(days=1))
    pipeline = Pipeline([channel])
    pipeline.stages(Movement, to=channel, key="account", object="movement")
    pipeline.consumer(reads=channel, name=BULK)(around(total_in_bulk))
    pipeline.consumer(reads=channel, name=EACH, each=True)(around(total_each))
    return pipeline


@cache
def pipeline_of(shards: int) -> Pipeline:
    """The pipeline with so many shards."""
    return pipeline_with(shards, lambda handler: handler)


def _keeping_nothing() -> Pipeline:
    """Four shards and one consumer: what it has applied goes."""
    channel = Log(CHANNEL, shards=4, keep=timedelta(0))
    pipeline = Pipeline([channel])
    pipeline.consumer(reads=channel, name=BULK)(total_in_bulk)
    return pipeline


one, four = pipeline_of(1), pipeline_of(4)
keeping_nothing = _keeping_nothing()
