"""Columns hold what rows held, whatever text it is; damage is an error and never other records."""

import gc
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batches.columns import CODECS, Codec, Columns, DamagedColumns
from penstock.batches.entry import MAX_RECORDS, Entry
from penstock.batches.record_batch import Records, as_records
from penstock.parsing import parse_several
from penstock.records import Offset, Record, RecordId, Shard, ShardName

SHARD = ShardName("things", Shard(0))
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
# Of Postgres' jsonb: no line break.
JSON = st.sampled_from(['{"a": 1}', '"\\n"', "[1, 2]", "null", '"ü\\u2028"', "1e400", "0"])
ROWS = st.lists(
    st.tuples(
        st.integers(0, 1 << 53),
        TEXT,
        TEXT,
        TEXT,
        JSON,
        st.sampled_from(["", '{"trace": "1"}']),
        st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999),
    ),
    min_size=1,
    max_size=40,
)


def row(number: int, **changed: Any) -> tuple[Any, ...]:
    values = {
        "id": number,
        "key": f"k{number}",
        "action": "insert",
        "object": "thing",
        "data": f'{{"n": {number}}}',
        "headers": "",
        "ts": 1_000_000 + number,
    }
    return tuple({**values, **changed}.values())


def values(record: Record) -> tuple[Any, ...]:
    return (
        record.id,
        record.key,
        record.action,
        record.object,
        record.data_json,
        record.headers_json,
        record.staged_us,
    )


@given(ROWS, st.sampled_from(CODECS), st.integers(1, 1 << 62))
def test_an_entry_holds_what_the_rows_held(rows: list[tuple[Any, ...]], codec: Codec, first: int) -> None:
    written = Entry(SHARD, Offset(first), Columns.pack(rows).compressed(codec))
    read = Entry.parse(SHARD, written.last, written.values())

    assert [values(record) for record in read.records] == rows
    assert [record.offset for record in read.records] == [*range(first, first + len(rows))]
    ends = read.columns.first_id, read.columns.first_us, read.columns.last_id, read.columns.last_us
    assert ends == (rows[0][0], rows[0][6], rows[-1][0], rows[-1][6])


@given(ROWS, st.data())
def test_slices_and_columns_are_those_of_a_list(rows: list[tuple[Any, ...]], data: st.DataObject) -> None:
    """Of records that come from entries of one record, from batches, or from both."""
    whole = Entry(SHARD, Offset(1), Columns.pack(rows)).records
    at = data.draw(st.integers(0, len(rows)))
    parts: list[Any] = []
    if at:
        parts.append(Entry(SHARD, Offset(1), Columns.pack(rows[:at])))
    if rows[at:]:
        parts.append(whole[at:])
    records = as_records(*parts)
    start, stop = sorted((data.draw(st.integers(-50, 50)), data.draw(st.integers(-50, 50))))

    assert [*records] == whole
    assert records[start:stop] == whole[start:stop]
    assert records[start:stop].offsets == [record.offset for record in whole[start:stop]]
    assert records.keys == [record.key for record in whole]
    assert [records[place] for place in range(-len(whole), len(whole))] == whole + whole


def test_a_line_break_in_a_payload_becomes_a_space() -> None:
    """In JSON it is white space; Postgres has none, but a DataFrame's text may."""
    packed = Columns.pack([row(1, data='{\n"n": 1}', headers="{\n}"), row(2)])

    assert packed.data_json == ['{ "n": 1}', '{"n": 2}']
    assert packed.headers_json == ["{ }", ""]


def test_payloads_that_are_json_only_together_are_an_error() -> None:
    """They cannot be taken for those of other records."""
    for texts in (("1, 2", "3"), ("[1", "2]")):
        records = as_records(Entry(SHARD, Offset(1), Columns.pack([row(i, data=t) for i, t in enumerate(texts)])))
        with pytest.raises(json.JSONDecodeError):
            _ = records.data


def test_records_out_of_range_are_an_error() -> None:
    records = as_records(Entry(SHARD, Offset(1), Columns.pack([row(1), row(2)])))

    with pytest.raises(IndexError):
        records[2]


def test_all_payloads_are_parsed_in_one_call() -> None:
    records = as_records(Entry(SHARD, Offset(1), Columns.pack([row(1), row(2)])))

    assert records.data == [{"n": 1}, {"n": 2}]
    assert Records().data == []


def test_what_is_parsed_of_a_record_stays_parsed() -> None:
    """Records are made anew each time, so that the garbage collector does not walk through those that were handled."""

    def count() -> int:
        return sum(type(each) is Record for each in gc.get_objects())  # isinstance() asks the objects of others, too

    before = count()
    records = as_records(Entry(SHARD, Offset(1), Columns.pack([row(1), row(2)])))
    first, second = (record.data for record in records)

    assert records[1].data is records[-1].data is [*records][1].data is records[1:][0].data is second
    assert records[0].data is first
    assert count() <= before


def test_each_payload_is_parsed_once_in_whatever_order_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the last to the first, as for the newest of each key, each had its five hundred neighbours parsed again."""
    parsed: list[str] = []

    def several(texts: Sequence[str]) -> list[Any]:
        parsed.extend(texts)
        return parse_several(texts)

    monkeypatch.setattr("penstock.records.parse_several", several)
    records = as_records(Entry(SHARD, Offset(1), Columns.pack([row(number) for number in range(1, 41)])))

    assert [record.data for record in reversed(records)] == [{"n": number} for number in range(40, 0, -1)]
    assert len(parsed) == len(set(parsed))


def test_equal_values_of_a_column_are_stored_once() -> None:
    columns = Columns.pack([row(number) for number in range(1, 501)])

    id_, _, action, object_, _, headers, ts = columns.texts
    assert (id_, action, object_, headers) == (b"0", b'"insert"', b'"thing"', b"")
    assert ts.count(b"\n") == 499


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("field", "damage"),
    [
        (0, b"x"),
        (0, b"0"),
        (0, b"9999"),
        (1, b"1"),
        (2, b"1 2 3"),
        (3, b"gzip"),
        (4, b"0\nx\n0"),
        (4, b"0\n0"),
        (5, b'"a"\n"b"'),
        (5, b'"a"\n1\n"c"'),
        (5, b'"a\n"b"\n"c"'),
        (5, b'"\\u0000"'),
        (5, b"\xff"),
        (5, b'"a"\nnull\n"c"'),
        (6, b'"a"\nnull\n"c"'),
        (7, b'"a"\nnull\n"c"'),
        (8, b"\xff\n1\n2"),
        (8, b"1\n2\n3\n4"),
        (10, b""),
    ],
)
def test_damage_is_found_when_an_entry_is_read(field: int, damage: bytes, codec: Codec) -> None:
    entry = Entry(SHARD, Offset(1), Columns.pack([row(1), row(5), row(9)]).compressed(codec))
    stored = entry.values()
    stored[field] = damage

    with pytest.raises(DamagedColumns):
        Entry.parse(SHARD, Offset(3), stored)


def test_an_entry_that_says_it_has_more_records_than_any_batch_is_damaged() -> None:
    assert Entry.parse_first(Offset(MAX_RECORDS), [b"1"]) == 1
    with pytest.raises(DamagedColumns):
        Entry.parse_first(Offset(MAX_RECORDS + 1), [b"1"])


def test_a_compressed_column_that_was_cut_or_changed_is_damaged() -> None:
    entry = Entry(SHARD, Offset(1), Columns.pack([row(1), row(5), row(9)]).compressed("zstd"))
    whole = entry.values()
    for place in range(len(whole[8])):
        for damaged in (whole[8][:place], whole[8][:place] + b"\x55" + whole[8][place + 1 :]):
            if damaged != whole[8]:
                with pytest.raises(DamagedColumns):
                    Entry.parse(SHARD, Offset(3), [*whole[:8], damaged, *whole[9:]])


def test_a_record_that_is_gone_has_no_key() -> None:
    columns = Columns.of_lines(
        2, RecordId(1), 5, [b"0\n0", b'"k"\nnull', b'"a"\nnull', b'"o"\nnull', b"1\n", b"\n", b"0\n0"]
    )

    assert columns.keys == ["k", None]
