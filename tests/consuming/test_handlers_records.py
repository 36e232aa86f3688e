"""What a handler may do with its records: what it did when they were a list, and columns, wherever they come from."""

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.flow import OpenWorker, Publish, Site
from penstock.batches.columns import Columns
from penstock.batches.entry import Entry
from penstock.batches.record_batch import Records, as_records
from penstock.database.store import Store
from penstock.operating.letters import of_consumer, retry
from penstock.parsing import parse_json
from penstock.records import Offset, Record, Shard, ShardName, forget_parsed

SHARD = ShardName("things", Shard(0))


@pytest.fixture
def entry() -> Entry:
    rows = [(n, f"k{-n}", "insert", "thing", f'{{"n": {n}}}', "", 1_000 + n) for n in range(1, 6)]
    return Entry(SHARD, Offset(1), Columns.pack(rows))


@pytest.fixture(params=["an entry", "two entries", "plain entries"])
def records(request: pytest.FixtureRequest, entry: Entry) -> Records:
    made = entry.records
    match request.param:
        case "an entry":
            return as_records(entry)
        case "two entries":
            rest = Entry(SHARD, Offset(1), entry.columns)
            return as_records(entry)[:2] + as_records(rest)[2:]
        case _:
            return as_records(made)


def test_the_payload_of_one_that_is_iterated_is_parsed_with_those_after_it(entry: Entry) -> None:
    """Unless it is not asked for; a payload that is no JSON fails for itself alone."""
    unasked = [record for record in as_records(entry) if "data" in record.__dict__]
    records = as_records(Entry(SHARD, Offset(1), entry.columns))
    at = [record.data for record in records if record.offset >= 2]
    first, second, *_ = records

    assert unasked == []
    assert at == [{"n": n} for n in range(2, 6)]
    assert "data" not in first.__dict__
    second.data["n"] = 7
    assert [record.data["n"] for record in records] == [1, 7, 3, 4, 5]  # the same objects

    rows = [(n, "k", "insert", "thing", text, "", n) for n, text in enumerate(("1", "2", "]", "3, 4", "5"), 1)]
    broken = as_records(Entry(SHARD, Offset(1), Columns.pack(rows)))
    read: list[Any] = []
    for record in broken:
        try:
            read.append(record.data)
        except ValueError:
            read.append(None)
    assert read == [1, 2, None, None, 5]


def test_they_are_used_as_a_list_is(records: Records, entry: Entry) -> None:
    same = entry.records

    assert records == same
    assert same == records
    assert records != same[1:]
    assert Records() == []
    assert not Records()
    assert (len(records), records[0], records[-1]) == (5, same[0], same[-1])
    assert records[::-1] == same[::-1] == [*reversed(records)]
    assert records[1:4:2] == same[1:4:2]
    assert sorted(records, key=attrgetter("key")) == sorted(same, key=attrgetter("key"))
    assert same[2] in records
    assert (records.index(same[2]), records.count(same[2])) == (2, 1)
    assert records + same == same + records == same + same
    first, *rest = records
    assert [first, *rest] == same
    assert isinstance(records, Sequence)


def test_they_match_a_pattern(records: Records) -> None:
    match records:
        case [Record(offset=1), *_, Record(offset=last)]:
            assert last == 5
        case _:
            pytest.fail("no match")


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_they_are_copied_and_sent_to_another_process(again: Callable[[Any], Any], records: Records) -> None:
    copied = again(records)

    assert copied == records
    assert again(records[3]) == records[3]
    assert copied.data == records.data


def test_a_record_is_written_as_json(records: Records) -> None:
    assert json.loads(json.dumps(vars(records[1])))["data_json"] == '{"n": 2}'
    assert json.dumps([record.data for record in records[:2]]) == '[{"n": 1}, {"n": 2}]'


def test_a_payload_that_is_two_values_is_no_payload() -> None:
    records = as_records([Record("things", Shard(0), Offset(1), 1, "k", "a", "o", "1,2")])  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="Extra data"):
        assert records.data


def test_columns_are_there_wherever_the_records_come_from(
    site: Site, publish: Publish, open_worker: OpenWorker
) -> None:
    """From the log, from the journal, halved, without a parked key, and from a dead letter."""
    seen: list[str] = []
    refused = {"k5"}

    @site.flow.consumer(reads=site.things, batch=9, attempts=1, park_key=True)
    def reader(_: Any, records: Any) -> None:
        if refused & {*records.keys}:
            raise ValueError
        seen.extend(records.data_json)

    with open_worker() as worker:
        for _ in range(3):
            publish(40)
        for shard in site.things.shard_names:
            stream = f"penstock:{{{shard}}}:log"
            entries: Any = site.client.xrange(stream)
            site.client.xdel(stream, entries[1][0])
        worker.drain()
    assert len(seen) == 117
    refused.clear()
    retry(site.flow, of_consumer(Store(site.connection), "reader"), site.database_url)

    assert len(seen) == 120
    assert set(seen) == {f'{{"number": {number}}}' for number in range(1, 41)}


_TEXTS = st.one_of(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ).map(json.dumps),
    st.sampled_from(["1, 2", "]", "[", "", "{", "nan", "[" * 2_000 + "]" * 2_000, "1e400", '"\\ud800"', "12 "]),
)


def _read(found: Record | str) -> str:
    """What a record's payload is, or that of its text."""
    try:
        return repr(parse_json(found) if isinstance(found, str) else found.data)
    except ValueError:
        return "cannot be read"


@pytest.mark.slow
@given(
    st.lists(_TEXTS, min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["ask", "change", "forget"])), max_size=30),
)
def test_a_payload_is_what_it_is_alone_in_whatever_order_they_are_asked_for(
    texts: list[str], steps: list[tuple[int, str]]
) -> None:
    lines = [text.replace("\n", " ") for text in texts]
    rows = [(n, "k", "insert", "thing", text, "", n) for n, text in enumerate(lines, 1)]
    records = as_records(Entry(SHARD, Offset(1), Columns.pack(rows)))
    changed: set[int] = set()

    for place, step in steps:
        at = place % len(lines)
        if step == "forget":
            forget_parsed(records[at])
            changed.discard(at)
        elif at not in changed:
            assert _read(records[at]) == _read(lines[at])
            if step == "change" and isinstance(records[at].__dict__.get("data"), list):
                records[at].data.append("mine")
                changed.add(at)
    for at in changed:
        assert records[at].data[-1] == "mine"
    for at in range(len(lines)):
        forget_parsed(records[at])
    assert [*map(_read, records)] == [*map(_read, lines)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(-1, 25))
def test_the_records_behind_an_offset_begin_right_after_it(counts: list[int], offset: int) -> None:
    parts, first = [], 3
    for number, count in enumerate(counts):
        rows = [(first + n, "k", "insert", "thing", "1", "", n) for n in range(count)]
        entry = Entry(SHARD, Offset(first), Columns.pack(rows))
        parts.append(entry if number % 2 else entry.records)
        first += count
    records = as_records(*parts)

    behind = records.after(Offset(offset))

    assert behind.offsets == [each for each in range(3, first) if each > offset]
    assert records.continues(Offset(offset)) == (offset + 1 in range(3, first))
    assert [record.offset for record in behind] == behind.offsets
