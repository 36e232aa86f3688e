"""The columns that Spark reads of a log's entries are those of the records of every other reader, and so is the error."""

import re
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.damaged_entries import COMPRESSED, PLAIN, Damage, Fields, mutate, set_to
from penstock.batches.columns import CODECS, Columns
from penstock.batches.entry import FIELDS, Entry
from penstock.channels.log.stream_entries import NAMES, parse_entries
from penstock.errors import ForeignLog
from penstock.records import Offset, Shard, ShardName
from penstock.spark.sources import entry_arrays
from penstock.spark.sources.record_columns import ARROW_SCHEMA

SHARD = ShardName("things", Shard(0))
SIMPLE = st.one_of(st.sampled_from(["k", "", "null", "\x7f", "\u2028", "😀", "'"]), st.text("abü1[]{},: ", max_size=8))
HOSTILE = st.one_of(
    st.sampled_from(['"', '"\n"', "\\", "a\tb"]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
)
JSON = st.sampled_from(
    ['{"a": 1}', '"\\n"', "[1, 2]", "null", '"ü\\u2028\u2028"', "1e400", "0", '""', "{}\r", "x" * 300]
)


def mutating(seed: int) -> Damage:
    """Puts anything into any column."""

    def damage(fields: Fields, _: int) -> None:
        random = Random(seed)
        name = random.choice(FIELDS)
        fields[name] = mutate(random, fields[name])

    return damage


def below_zero(fields: Fields, _: int) -> None:
    """An id between the first and the last."""
    lines = fields[b"ids"].split(b"\n")
    if len(lines) > 2:
        lines[1] = b"-%d" % (1 << 62)
    fields[b"ids"] = b"\n".join(lines)


DAMAGED: dict[str, Damage] = {
    **PLAIN,
    "a line break in a key": set_to(b"keys", b'"a"b\n"c"'),
    "a quote alone": set_to(b"actions", b'"'),
    "no quotes": set_to(b"objects", b"aa"),
    "quotes elsewhere": set_to(b"objects", b'a""'),
    "an id that only Arrow takes for a number": lambda fields, _: fields.update({b"ids": b"0x" + fields[b"ids"]}),
    "an id below zero": below_zero,
}


def zero_before(fields: Fields, _: int) -> None:
    """A number that is no JSON."""
    fields[b"ids"] = b"0" + fields[b"ids"]


HOW = st.sampled_from([*DAMAGED.values(), zero_before, *map(mutating, range(30))])


def make_entries(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Any]]:
    """Of each its rows, its form, and the number of records that are missing before it."""
    row = st.tuples(
        st.one_of(st.integers(0, 50), st.integers(0, (1 << 63) - 1)),
        text,
        st.one_of(st.just("insert"), text),
        st.one_of(st.just("thing"), text),
        JSON,
        st.sampled_from(["", '{"trace": "1"}']),
        st.one_of(st.integers(0, 3), st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)),
    )
    entry = st.tuples(
        st.lists(row, min_size=1, max_size=12),
        st.sampled_from([*CODECS, "none", "plain"]),
        st.sampled_from([0, 0, 0, 0, 1]),
    )
    return st.lists(entry, min_size=1, max_size=8)


Raw = tuple[bytes, list[bytes]]


def write(entries: list[Any], place: int = 0, damage: Damage | None = None) -> list[Raw]:
    """Entries as the server sends them, one of which is damaged."""
    found: list[Raw] = []
    first = 1
    for number, (rows, codec, missing) in enumerate(entries):
        first += missing
        if codec == "plain":
            for offset, row in enumerate(rows, first):
                found.append((b"%d-0" % offset, interleave(NAMES, [str(value).encode() for value in row])))
        else:
            entry = Entry(SHARD, Offset(first), Columns.pack(rows).compressed(codec))
            fields = dict(zip(FIELDS, entry.values(), strict=True))
            if damage is not None and number == place:
                damage(fields, entry.last)
            found.append((b"%d-0" % entry.last, interleave([*fields], [*fields.values()])))
        first += len(rows)
    return found


def interleave(names: list[bytes], values: list[bytes]) -> list[bytes]:
    return [each for pair in zip(names, values, strict=True) for each in pair]


def read_records(entries: list[Raw]) -> tuple[list[tuple[Any, ...]], str]:
    """The records before the first entry that cannot be read, and its error."""
    error, whole = "", len(entries)
    try:
        parse_entries(SHARD, entries)
    except ForeignLog as found:
        error, whole = str(found), next(n for n in range(len(entries)) if is_refused(entries[: n + 1]))
    records = parse_entries(SHARD, entries[:whole])
    rows = [
        (r.offset, r.id, r.key, r.action, r.object, r.data_json, r.headers_json or None, r.staged_us) for r in records
    ]
    return rows, error


def is_refused(entries: list[Raw]) -> bool:
    try:
        parse_entries(SHARD, entries)
    except ForeignLog:
        return True
    return False


def read_arrays(entries: list[Raw]) -> tuple[list[tuple[Any, ...]], str]:
    rows: list[tuple[Any, ...]] = []
    try:
        for read in entry_arrays.read_entries(SHARD, entries):
            read.validate(full=True)
            assert read.schema == ARROW_SCHEMA
            offsets = read.column("offset").to_pylist()
            assert offsets == [*range(offsets[0], offsets[0] + len(offsets))]  # so that a hole is seen
            assert set(read.column("channel").to_pylist()) == {"things"}
            assert set(read.column("shard").to_pylist()) == {0}
            times = read.column("timestamp").cast(pa.int64())
            rows += zip(*(each.to_pylist() for each in [*read.columns[2:9], times]), strict=True)
    except ForeignLog as error:
        return rows, str(error)
    return rows, ""


@pytest.mark.slow
@given(
    st.one_of(make_entries(SIMPLE), make_entries(SIMPLE), make_entries(HOSTILE)),
    st.sampled_from([1, 9, 5000]),
    st.sampled_from([100, 1 << 22]),
    st.integers(0, 7),
    st.one_of(st.none(), HOW),
)
def test_columns_are_those_of_the_records(
    entries: list[Any], rows: int, size: int, place: int, damage: Damage | None
) -> None:
    """A second: a hundred logs."""
    written = write(entries, place, damage)
    with patch.object(entry_arrays, "ROWS_TOGETHER", rows), patch.object(entry_arrays, "BYTES_TOGETHER", size):
        assert read_arrays(written) == read_records(written)


@pytest.mark.parametrize("codec", [*CODECS, "none", "plain"])
@pytest.mark.parametrize("keys", [1, 2, 60])
def test_intact_entries_are_read_together_and_none_alone(codec: str, keys: int) -> None:
    """That would be right, too, and slow."""
    rows = [(3 * n, f"k{n % keys}", "insert", "thing", f'{{"n": {n}}}', "", 1_000_000 + n) for n in range(1, 61)]
    written = write([(rows[first : first + 20], codec, 0) for first in (0, 20, 40)])
    with (
        patch.object(entry_arrays, "_parse_alone", side_effect=AssertionError),
        patch.object(entry_arrays, "parse_entries", side_effect=AssertionError),
    ):
        assert read_arrays(written) == read_records(written)


@pytest.mark.parametrize(
    ("codec", "how"), [("none", each) for each in DAMAGED] + [("zstd", each) for each in COMPRESSED]
)
def test_damage_is_the_error_of_its_entry(codec: str, how: str) -> None:
    """What comes before it is read."""
    rows = [(3 * n, f"k{n}", "insert", "thing", f'{{"n": {n}}}', "", 1_000_000 + n) for n in range(1, 61)]
    entries = [(rows[first : first + 20], codec, 0) for first in (0, 20, 40)]
    found, error = read_arrays(write(entries, 1, (DAMAGED if codec == "none" else COMPRESSED)[how]))

    assert [row[0] for row in found] == [*range(1, 21)]
    assert re.match(r"things/0: entry 40-0 \(offset.* is damaged: ", error)


@pytest.mark.parametrize(("place", "found"), [(1, b"0x5"), (3, b"a\0"), (13, b"1 "), (2, b"name")])
def test_damage_of_a_plain_entry_is_the_error_of_every_other_reader(place: int, found: bytes) -> None:
    written = write([([(n, "k", "insert", "thing", "1", "", 0) for n in range(1, 4)], "plain", 0)])
    written[1][1][place] = found

    assert read_arrays(written)[1] == read_records(written)[1] != ""


@pytest.mark.parametrize(("size", "together"), [(10_000, 9), (500, 1)])
def test_equal_payloads_that_are_stored_once_do_not_come_all_at_once(size: int, together: int) -> None:
    """A payload of a megabyte could be that of 10,000 records."""
    rows = [(n, "k", "insert", "thing", "x" * 1000, "", 0) for n in range(1, 401)]
    written = write([(rows, "none", 0)])
    with patch.object(entry_arrays, "MAX_BYTES", 100_000), patch.object(entry_arrays, "BYTES_TOGETHER", size):
        found = [*entry_arrays.read_entries(SHARD, written)]

    assert max(map(len, found)) == together
    assert pa.Table.from_batches(found).column("offset").to_pylist() == [*range(1, 401)]
