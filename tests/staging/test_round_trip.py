"""Every value that passes validation reads back equal from Postgres, in the documented encoding."""

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.embedded import EmbeddedPostgres
from penstock.staging.payload import json_text

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"))
ZONES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**4299), 10**4299)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.uuids()
    | st.dates()
    | st.datetimes()
    | st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=ZONES)  # noqa: DTZ001  Hypothesis adds the zone
    | st.times()
    | st.timedeltas()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)


@pytest.fixture(scope="module")
def connection(postgres: EmbeddedPostgres) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.url, autocommit=True) as opened:
        opened.execute("SET intervalstyle = 'iso_8601'")
        yield opened


def assert_same(value: Any, back: Any, connection: psycopg.Connection) -> None:
    """Asserts that a consumer that knows the type can recover the value."""
    if isinstance(value, dict):
        assert value.keys() == back.keys()
        for key, member in value.items():
            assert_same(member, back[key], connection)
    elif isinstance(value, list):
        assert len(value) == len(back)
        for member, member_back in zip(value, back, strict=True):
            assert_same(member, member_back, connection)
    elif isinstance(value, timedelta):
        row = connection.execute(
            "SELECT (%s::interval)::text, %s::interval = %s::interval", (back, back, value)
        ).fetchone()
        assert row == (back, True)
    else:
        assert _read(value, back) == value
        assert isinstance(back, (str, int, float, type(None)))


def _read(value: Any, back: Any) -> Any:
    if isinstance(value, float):
        return float(back)
    for kind in (datetime, date, time):
        if isinstance(value, kind):
            return kind.fromisoformat(back)
    return type(value)(back) if isinstance(value, (Decimal, UUID)) else back


@given(VALUES)
@example(2**53 + 1)
@example(1.7976931348623157e308)
@example(5e-324)
@example(-0.0)
@example(Decimal("1E+131071"))
@example({"": {"": [""]}, "\u2028": "\x7f\x01"})
@example(datetime(2026, 3, 29, 2, 30, tzinfo=UTC))
@example(r"\u0000")
def test_a_valid_value_reads_back_equal(connection: psycopg.Connection, value: Any) -> None:
    """Guarantee 22: ``jsonb`` accepts every value that passes."""
    row = connection.execute("SELECT CAST(%s AS jsonb)::text", (json_text(value, "data", 10**7),)).fetchone()

    assert row is not None
    assert_same(value, json.loads(row[0]), connection)
