"""What others have written is parsed, or is a ``ValueError``: nothing else, whatever the text, the stack and Python's release."""

import json
from contextlib import suppress
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.damaged_entries import mutate
from penstock import parsing
from penstock.batches.columns import CODECS, Columns
from penstock.batches.entry import FIELDS, Entry
from penstock.channels.log.stream_entries import NAMES, parse_entries, parse_first, parse_last
from penstock.errors import ForeignLog
from penstock.parsing import MAX_NESTING, MAX_NUMBER, Duration, UnreadableJson, find_number, parse_duration, parse_json
from penstock.records import Offset, Shard, ShardName

SHARD = ShardName("things", Shard(0))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text('[]{}"\\a', max_size=9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
)


def nested(depth: int, kind: str = "[]") -> str:
    """Lists or objects in one another, with brackets in a text and beside them that are not nested."""
    if kind == "[]":
        return '[[], {}, "[[{{", ' * depth + "0" + "]" * depth
    return '{"}": [], "a": ' * depth + "0" + "}" * depth


@pytest.fixture(params=["by msgspec", "without it"], autouse=True)
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has msgspec; an application that reads a log of its own need not."""
    if request.param == "by msgspec":
        assert parsing._decoder() != parsing._scan
    else:
        monkeypatch.setattr(parsing, "_decoder", lambda: parsing._scan)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(value=VALUES, around=st.sampled_from(["", " ", "\n"]), is_ascii=st.booleans())
def test_json_is_read_as_the_standard_library_reads_it(value: Any, around: str, *, is_ascii: bool) -> None:
    """Each number with its digits and its type, each text with its characters, the last of equal names."""
    text = f"{around}{json.dumps(value, ensure_ascii=is_ascii)}{around}"
    assert repr(parse_json(text)) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        "1e400",
        "-0",
        "-0.0",
        "1E5",
        "18446744073709551616",
        "9007199254740993.0",
        '"\\ud800"',
        '{"a": 1, "a": 2}',
        "NaN",
    ],
)
def test_what_parsers_disagree_about_is_read_as_the_standard_library_reads_it(text: str) -> None:
    assert repr(parse_json(text)) == repr(json.loads(text))


@pytest.mark.parametrize("kind", ["[]", "{}"])
def test_the_limit_of_nesting_is_the_same_wherever_it_is_read(kind: str) -> None:
    def at(frames: int, text: str) -> Any:
        return at(frames - 1, text) if frames else parse_json(text)

    depth = MAX_NESTING - 1  # the innermost lists are one more
    for frames in (0, 300):
        at(frames, nested(depth, kind))
        for deeper in (depth + 1, 985, 100_000):
            with pytest.raises(UnreadableJson, match="too deep: 500 levels"):
                at(frames, nested(deeper, kind))


@pytest.mark.parametrize("text", ["", "nul", "1 2", "[1", '"\x01"', "9" * 5000, " " + "[" * 100_000, "\ufeff1", "{]"])
def test_everything_else_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@given(st.integers(-MAX_NUMBER, MAX_NUMBER))
def test_a_number_is_read(number: int) -> None:
    assert find_number(b"%d" % number) == number


@pytest.mark.parametrize(
    "text", ["", "-", "--1", "+1", "1_0", " 1", "1 ", "1.0", "²", "٣", "9" * 19, "-" + "9" * 19, "9" * 5000]
)
def test_what_only_python_takes_for_a_number_is_none(text: str) -> None:
    assert find_number(text.encode()) is None


ROWS = [
    (2 * i, f'k"{i}ü', "insert", "thing", f'{{"n": {i}}}', '{"h": 1}' * (i % 2), 1_000_000 + i) for i in range(1, 8)
]
SINGLE = dict.fromkeys(NAMES, b"1") | {b"data": b"{}", b"headers": b""}


def test_a_changed_entry_is_read_or_is_a_foreign_log() -> None:
    """Guarantee 30, of 3,000 entries: a second.  What is read of it, Postgres and Arrow can hold."""
    random = Random(5)
    columns = [Columns.pack(ROWS).compressed(codec) for codec in CODECS]
    packed = [Entry(SHARD, Offset(11), each).values() for each in columns]
    whole = [SINGLE, *(dict(zip(FIELDS, each, strict=True)) for each in packed)]
    seen = 0
    for _ in range(3_000):
        fields = dict(random.choice(whole))
        for name in random.sample([*fields], random.choice([1, 2])):
            fields[name] = mutate(random, fields[name])
        with suppress(ForeignLog):
            parse_first(SHARD, b"17-0", fields)
            parse_last(SHARD, b"17-0", fields)
            for record in parse_entries(SHARD, [(b"17-0", fields)]):
                seen += 1
                labels = record.key + record.action + record.object
                assert b"\0" not in labels.encode()
                assert max(abs(record.id), abs(record.staged_us)) <= MAX_NUMBER
                for text in (record.data_json, record.headers_json):
                    with suppress(ValueError):
                        parse_json(text)
    assert seen > 1000


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        ("20ms", 0.02),
        ("90", 90),
        ("1.5 s", 1.5),
        ("10m", 600),
        ("2h", 7200),
        ("7d", 604_800),
        (3, 3),
        (timedelta(minutes=1), 60),
    ],
)
def test_a_duration_is_a_number_of_seconds_a_timedelta_or_a_text(duration: Duration, seconds: float) -> None:
    assert parse_duration(duration) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "duration", ["", "soon", "-1", "1y", "1e3", "10m 5s", -1, float("nan"), float("inf"), timedelta(-1)]
)
def test_anything_else_is_no_duration(duration: Duration) -> None:
    with pytest.raises(ValueError, match="no duration"):
        parse_duration(duration)
