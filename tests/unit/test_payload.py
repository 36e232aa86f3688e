"""Values that a record may contain, and the refusal of all others."""

import json
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import InvalidRecord
from penstock.staging.payload import MAX_DEPTH, headers_text, json_text, key_text, label_text

ENOUGH = 10_000_000


class Colour(Enum):
    RED = "r"
    ODD = b"x"


class Size(IntEnum):
    BIG = 3


class Word(StrEnum):
    YES = "y"


Point = namedtuple("Point", "x y")  # noqa: PYI024  untyped ones are accepted too


@dataclass
class Line:
    price: int


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (2**53 + 1, "9007199254740993"),
        (-(10**4299), f"-1{'0' * 4299}"),
        (0.1, "0.1"),
        ("ü\U0001f600\u2028\n", '"ü\U0001f600\u2028\\n"'),
        (r"\u0000", r'"\\u0000"'),
        (Decimal("12.50"), '"12.50"'),
        (Decimal("1E+3"), '"1000"'),
        (Decimal("-0.000"), '"-0.000"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (datetime(2026, 1, 2, 3, 4, 5), '"2026-01-02T03:04:05.000000"'),  # noqa: DTZ001  naive on purpose
        (datetime(2026, 1, 2, 3, tzinfo=UTC), '"2026-01-02T03:00:00.000000+00:00"'),
        (datetime(2026, 1, 2, 3, 0, 0, 7, tzinfo=timezone(timedelta(hours=-5))), '"2026-01-02T08:00:00.000007+00:00"'),
        (time(3, 4), '"03:04:00.000000"'),
        (timedelta(0), '"PT0S"'),
        (timedelta(days=3), '"P3D"'),
        (timedelta(days=-1, hours=1), '"P-1DT1H"'),
        (timedelta(hours=26, minutes=3, microseconds=50), '"P1DT2H3M0.00005S"'),
        (Colour.RED, '"r"'),
        ({"a": Size.BIG, Word.YES: Word.YES}, '{"a":3,"y":"y"}'),
        (Point(1, (2, 3)), "[1,[2,3]]"),
        (OrderedDict(b=1, a=2), '{"b":1,"a":2}'),
    ],
)
def test_values_are_encoded_as_documented(value: object, text: str) -> None:
    assert json_text(value, "data", ENOUGH) == text


CYCLE: list[Any] = [1]
CYCLE.append({"again": CYCLE})


@pytest.mark.parametrize(
    ("value", "field", "reason"),
    [
        ({"lines": [0, {"price": math.nan}]}, "data.lines[1].price", "NaN"),
        ({"a": math.inf}, "data.a", "NaN or infinite"),
        ([-math.inf], "data[0]", "NaN or infinite"),
        ({"a": Decimal("NaN")}, "data.a", "Decimal NaN"),
        ({"a": Decimal("sNaN")}, "data.a", "Decimal NaN"),
        ({"a": Decimal("-Infinity")}, "data.a", "Decimal NaN or infinity"),
        ({"a": Decimal("1E+131072")}, "data.a", "beyond Postgres' numeric"),
        ({"a": Decimal("1E-16384")}, "data.a", "beyond Postgres' numeric"),
        ({"a": Decimal("1E+999999999")}, "data.a", "beyond Postgres' numeric"),
        ({"a": 10**4300}, "data.a", "4300 digits"),
        ({"a": "x\x00y"}, "data.a", "NUL"),
        ({"x\x00y": 1}, r"data['x\x00y'] (the name itself)", "NUL"),
        ({"a": "\ud83d"}, "data.a", "surrogate"),
        ({"\udc00": 1}, r"data['\udc00'] (the name itself)", "surrogate"),
        ({"a": {1: 2}}, "data.a", "key of type int"),
        ({None: 2}, "data", "key of type NoneType"),
        ({(1, 2): 2}, "data", "key of type tuple"),
        ({"a b": b"x"}, "data['a b']", "base64"),
        ({" " * 40: b"x"}, f"data['{' ' * 40}']", "base64"),
        ({" " * 41: b"x"}, f"data['{' ' * 40}\\u2026']", "base64"),
        ({"a" * 40: b"x"}, f"data.{'a' * 40}", "base64"),
        ({"a" * 41: b"x"}, f"data['{'a' * 40}\\u2026']", "base64"),
        ({"a": bytearray()}, "data.a", "base64"),
        ({"a": {1}}, "data.a", "sorted list"),
        ({"a": frozenset()}, "data.a", "sorted list"),
        ({"a": Line(1)}, "data.a", "asdict"),
        ({"a": object()}, "data.a", "type object"),
        ({"a": range(3)}, "data.a", "type range"),
        ({"a": 1j}, "data.a", "type complex"),
        ({"a": Colour.ODD}, "data.a", "type bytes"),
        (CYCLE, "data[1].again", "contains itself"),
        (nested(MAX_DEPTH + 1), "data" + "[0]" * MAX_DEPTH, "deeper than 100"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), "data", "years 1 to 9999"),
    ],
)
def test_a_value_that_postgres_or_a_reader_cannot_handle_is_refused(value: object, field: str, reason: str) -> None:
    """Guarantee 22: a typed error with the path of the field; and so is a member of an enum that has such a value."""
    for payload in (value, Enum("Given", {"MEMBER": value}).MEMBER):  # type: ignore[attr-defined]
        with pytest.raises(InvalidRecord) as refused:
            json_text(payload, "data", ENOUGH)

        assert refused.value.field == field
        assert reason in str(refused.value)
        assert refused.value.__context__ is None


def test_the_limits_are_exact() -> None:
    assert json_text(nested(MAX_DEPTH), "data", ENOUGH)
    for number in ("1E+131071", "1E-16383"):
        assert json_text(Decimal(number), "data", ENOUGH)
    assert json_text("ü" * 3, "data", 8)
    with pytest.raises(InvalidRecord, match=r"8 bytes of JSON; the limit is 7 \(max_bytes"):
        json_text("ü" * 3, "data", 7)


def test_very_deep_nesting_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(InvalidRecord, match="deeper than 100"):
        json_text(nested(500_000), "data", ENOUGH)


def test_an_error_shows_no_value() -> None:
    """Guarantee 33: it contains only the field and the type."""
    for value in ({"a": ["canary\x00"]}, {"a": {"canary"}}, {"a": b"canary"}, {"a": ["canary" * 99]}):
        with pytest.raises(InvalidRecord) as refused:
            json_text(value, "data", 100)
        assert "canary" not in repr(refused.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [("k", "k"), (7, "7"), (-1, "-1"), (UUID(int=1), str(UUID(int=1))), (Word.YES, "y"), (Size.BIG, "3")],
)
def test_a_key_is_a_str_an_int_or_a_uuid(value: object, text: str) -> None:
    assert key_text(value) == text
    assert type(key_text(value)) is str


def test_labels_and_headers() -> None:
    assert label_text("imported", "action") == "imported"
    assert headers_text(None) is None
    assert headers_text({}) == "{}"
    with pytest.raises(InvalidRecord, match=r"^action: has 256"):
        label_text("w" * 256, "action")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.decimals()
    | st.uuids()
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.timedeltas()
    | st.binary(max_size=2)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def is_acceptable(value: object) -> bool:
    """The same rule, written as simply as possible."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_acceptable(k) and is_acceptable(v) for k, v in value.items())
    if isinstance(value, list):
        return all(is_acceptable(member) for member in value)
    if isinstance(value, str):
        return not any(c == "\x00" or "\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Decimal):
        exponent = value.as_tuple().exponent
        return isinstance(exponent, int) and exponent >= -16_383 and value.adjusted() < 131_072
    return not isinstance(value, bytes)


@given(VALUES)
@example({"a": r"\u0000"})
@example([r"\\u0000", "\x00"])
def test_the_fast_encoder_and_the_validation_agree(value: Any) -> None:
    """Guarantee 22: exactly the acceptable values pass, as JSON that Postgres accepts."""
    if is_acceptable(value):
        text = json_text(value, "data", ENOUGH)
        json.loads(text, parse_constant=pytest.fail)
        assert "\x00" not in text
    else:
        with pytest.raises(InvalidRecord):
            json_text(value, "data", ENOUGH)
