"""The application that is measured: movements on accounts are streamed to a channel, and consumers add them up.

``get_pipeline`` returns the pipeline for a number of shards; ``one``, ``four``, ``keeping_nothing`` and their twins with
plain entries can be imported by name, as ``--app`` does.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Literal

from sqlalchemy import BigInteger, MetaData, Text, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import Log, Pipeline, Record
from penstock.batches.record_batch import join_records

SCHEMA = "bench"
CHANNEL = "movements"
BULK, EACH = "totals", "totals-each"
ASYNC, ASYNC_EACH = "totals-async", "totals-async-each"
COLUMNS = "totals-columns"

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
""").bindparams(*(bindparam(name, type_=ARRAY(BigInteger)) for name in ("accounts", "movements", "cents")))


AROUND_A_NOTE = 55
"""Bytes of a payload without its note."""

NOTE = "x" * (200 - AROUND_A_NOTE)

Form = Literal["packed", "zstd", "plain"]
"""How the log keeps records: in packed entries, as by default; in compressed ones; each in an entry of its own."""

ConsumerFunction = Callable[..., None]
"""A consumer's function: takes a session, and one record or several."""


class Base(DeclarativeBase):
    """Puts the application's tables into a schema of their own."""

    metadata = MetaData(schema=SCHEMA)


class Movement(Base):
    """A movement of money on an account."""

    __tablename__ = "movements"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    account: Mapped[int] = mapped_column(BigInteger)
    cents: Mapped[int] = mapped_column(BigInteger)
    note: Mapped[str] = mapped_column(Text)


def total_in_bulk(session: Session, records: Sequence[Record]) -> None:
    """Adds up a batch, and writes it with one statement."""
    session.execute(_ADD_ALL, _sums(record.data for record in records))


def total_columns(session: Session, records: Sequence[Record]) -> None:
    """The same, of payloads that are parsed in one call, without a record being made."""
    session.execute(_ADD_ALL, _sums(join_records([records]).data))


def _sums(payloads: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    movements: dict[int, int] = defaultdict(int)
    cents: dict[int, int] = defaultdict(int)
    for data in payloads:
        movements[data["account"]] += 1
        cents[data["account"]] += data["cents"]
    # Sorted, so that two shards that update the same accounts wait for each other and do not deadlock.
    accounts = sorted(movements)
    return {"accounts": accounts, "movements": [movements[a] for a in accounts], "cents": [cents[a] for a in accounts]}


def total_each(session: Session, record: Record) -> None:
    """Writes one statement per record."""
    session.execute(_ADD_EACH, {"account": record.data["account"], "cents": record.data["cents"]})


def make_channel(form: Form, shards: int = 4, keep: timedelta = timedelta(days=1)) -> Log:
    """The channel."""
    return Log(
        CHANNEL,
        shards=shards,
        keep=keep,
        entries="plain" if form == "plain" else "packed",
        compression="zstd" if form == "zstd" else "none",
    )


def make_pipeline(
    shards: int, wrap: Callable[[ConsumerFunction], ConsumerFunction] = lambda function: function, form: Form = "packed"
) -> Pipeline:
    """A pipeline with its rules and its consumers, whose functions are wrapped."""
    channel = make_channel(form, shards)
    pipeline = Pipeline([channel])
    pipeline.stages(Movement, to=channel, key="account", object="movement")
    pipeline.consumer(reads=channel, name=BULK)(wrap(total_in_bulk))
    pipeline.consumer(reads=channel, name=EACH, each=True)(wrap(total_each))
    return pipeline


def make_async_pipeline() -> Pipeline:
    """The channel of ``four``, and the same consumers with handlers that are ``async def``."""
    channel = make_channel("packed")
    pipeline = Pipeline([channel])

    @pipeline.consumer(reads=channel, name=ASYNC)
    async def in_bulk(session: AsyncSession, records: Sequence[Record]) -> None:
        await session.execute(_ADD_ALL, _sums(record.data for record in records))

    @pipeline.consumer(reads=channel, name=ASYNC_EACH, each=True)
    async def one_by_one(session: AsyncSession, record: Record) -> None:
        data = record.data
        await session.execute(_ADD_EACH, {"account": data["account"], "cents": data["cents"]})

    return pipeline


def make_columns_pipeline(form: Form) -> Pipeline:
    """The channel of ``four``, and a consumer that takes columns."""
    channel = make_channel(form)
    pipeline = Pipeline([channel])
    pipeline.consumer(reads=channel, name=COLUMNS)(total_columns)
    return pipeline


@cache
def get_pipeline(shards: int, form: Form = "packed", *, observed: bool = False) -> Pipeline:
    """The pipeline with this number of shards."""
    pipeline = make_pipeline(shards, form=form)
    return observe(pipeline) if observed else pipeline


def observe(pipeline: Pipeline) -> Pipeline:
    """The same, with what ``--listen`` adds to it."""
    from penstock.observing.probes import Probes  # noqa: PLC0415  not for what has no metrics
    from penstock.observing.process_metrics import ProcessMetrics  # noqa: PLC0415  the same

    pipeline.observe(Probes())
    ProcessMetrics(pipeline)
    return pipeline


def _make_pipeline_that_keeps_nothing(form: Form) -> Pipeline:
    """Four shards and one consumer; retention removes records as soon as they are applied."""
    channel = make_channel(form, keep=timedelta(0))
    pipeline = Pipeline([channel])
    pipeline.consumer(reads=channel, name=BULK)(total_in_bulk)
    return pipeline


one, four, four_plain = get_pipeline(1), get_pipeline(4), get_pipeline(4, "plain")
keeping_nothing = _make_pipeline_that_keeps_nothing("packed")
keeping_nothing_plain = _make_pipeline_that_keeps_nothing("plain")
