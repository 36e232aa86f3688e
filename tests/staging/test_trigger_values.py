"""A trigger encodes every value as the hooks do, whatever the value is."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import ARRAY, Engine, Interval, Numeric, String, create_engine, insert, text, types
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fixtures.postgres import engine_url
from penstock import Log, Pipeline
from penstock.embedded import EmbeddedPostgres
from penstock.schema.initialise import initialise
from penstock.staging.payload import json_text
from penstock.staging.triggers import make_trigger


class Base(DeclarativeBase):
    """The application's own table."""


class Sample(Base):
    __tablename__ = "samples"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    note: Mapped[Any] = mapped_column(String, nullable=True)
    number: Mapped[Any] = mapped_column(types.BigInteger, nullable=True)
    exact: Mapped[Any] = mapped_column(Numeric, nullable=True)
    real: Mapped[Any] = mapped_column(types.Double, nullable=True)
    flag: Mapped[Any] = mapped_column(types.Boolean, nullable=True)
    day: Mapped[Any] = mapped_column(types.Date, nullable=True)
    clock: Mapped[Any] = mapped_column(types.Time, nullable=True)
    moment: Mapped[Any] = mapped_column(types.DateTime(timezone=True), nullable=True)
    local: Mapped[Any] = mapped_column(types.DateTime, nullable=True)
    span: Mapped[Any] = mapped_column(Interval, nullable=True)
    extra: Mapped[Any] = mapped_column(JSONB(none_as_null=True), nullable=True)
    tags: Mapped[Any] = mapped_column(ARRAY(String), nullable=True)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
ZONES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "note": TEXT,
    "number": st.integers(-(2**63), 2**63 - 1),
    "exact": st.decimals(allow_nan=False, allow_infinity=False).filter(lambda number: abs(number.adjusted()) < 2000),
    "real": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "day": st.dates(),
    "clock": st.times(),
    "moment": st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=ZONES),  # noqa: DTZ001  Hypothesis adds the zone
    "local": st.datetimes(),
    "span": st.timedeltas(timedelta(days=-(10**7)), timedelta(days=10**7)),
    "extra": st.dictionaries(TEXT, st.integers() | TEXT | st.none(), max_size=3),
    "tags": st.lists(TEXT | st.none(), max_size=3),
}


@pytest.fixture(scope="module")
def application(postgres: EmbeddedPostgres) -> Iterator[Engine]:
    """A database whose only table is captured by a trigger, and whose digits of floats are not shown."""
    url = postgres.create_database("trigger_values")
    initialise(url)
    engine = create_engine(engine_url(url))
    things = Log("things", shards=1)
    rule = Pipeline([things]).stages(Sample, to=things, key="id", capture="trigger")
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        for statement in make_trigger(rule, "penstock").statements:
            connection.execute(text(statement.replace(":", r"\:")))
        connection.execute(text("ALTER DATABASE trigger_values SET extra_float_digits = -15"))
    engine.dispose()
    yield engine
    engine.dispose()
    postgres.drop_database("trigger_values")


@settings(max_examples=50)
@given(st.fixed_dictionaries({}, optional=VALUES))
@example({"exact": Decimal("-0.0"), "real": -0.0, "number": -(2**63)})
@example({"exact": Decimal("1E+30"), "real": 1.7976931348623157e308, "note": ""})
@example({"real": 5e-324, "moment": datetime(2, 1, 1, tzinfo=UTC), "span": timedelta(microseconds=-1)})
def test_a_trigger_encodes_a_value_as_the_hooks_do(application: Engine, values: dict[str, Any]) -> None:
    """Guarantee 22: no digit, no zone and no character is lost between the column and the record."""
    row = {"id": uuid4(), **values}
    with application.begin() as connection:
        connection.execute(insert(Sample).values(row))
        [data] = connection.execute(
            text("SELECT data FROM penstock.staged_records WHERE key = :key"), {"key": str(row["id"])}
        ).scalars()

    expected = json.loads(json_text({name: row.get(name) for name in data}, "data", 10**6))
    for name, kind in (("exact", Decimal), ("real", float)):
        wanted, found = expected.pop(name), data.pop(name)
        assert (found is None) == (wanted is None)
        assert found is None or kind(found) == kind(wanted)
    assert data == expected
