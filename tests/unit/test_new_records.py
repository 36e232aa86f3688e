"""What a sink lacks of a micro-batch, by offset."""

import logging

import pyarrow as pa
import pytest

from penstock.errors import Gap, InvalidSetting
from penstock.spark import new_records


def make_rows(*places: tuple[str, int, int]) -> pa.Table:
    names = ("channel", "shard", "offset")
    return pa.Table.from_pylist([dict(zip(names, place, strict=True)) for place in places])


def find_new(rows: pa.Table, **known: int) -> dict[str, list[int]]:
    by_name = {name.replace("_", "/"): last for name, last in known.items()}
    found = new_records(rows, by_name.get)
    return {shard: each["offset"].to_pylist() for shard, each in found.items()}


ROWS = make_rows(("b", 0, 7), ("a", 1, 2), ("a", 0, 6), ("a", 1, 1), ("a", 0, 5), ("a", 1, 3))


def test_a_sink_gets_what_it_lacks_of_each_shard_in_order() -> None:
    assert find_new(ROWS) == {"a/0": [5, 6], "a/1": [1, 2, 3], "b/0": [7]}
    assert find_new(ROWS, a_0=4, a_1=2, b_0=7) == {"a/0": [5, 6], "a/1": [3]}
    assert find_new(ROWS, a_0=6, a_1=3, b_0=9000) == {}
    assert find_new(make_rows(("a", 0, 1)).slice(1)) == {}


def test_what_the_sink_has_already_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        find_new(ROWS)
        assert not caplog.messages
        find_new(ROWS, a_1=2)

    assert caplog.messages == ["the sink has 2 of 6 records already"]


@pytest.mark.parametrize(
    ("places", "known"),
    [
        ([("a", 0, 5), ("a", 0, 6)], {"a_0": 3}),
        ([("a", 0, 5), ("a", 0, 7)], {"a_0": 4}),
        ([("a", 0, 5), ("a", 0, 7)], {}),
        ([("a", 0, 5), ("a", 0, 5)], {"a_0": 4}),
        ([("a", 0, 5), ("a", 0, 5), ("a", 0, 7)], {"a_0": 4}),
    ],
)
def test_missing_and_doubled_records_are_refused(places: list[tuple[str, int, int]], known: dict[str, int]) -> None:
    end = f"ends at offset {known['a_0']}," if known else "has no record,"
    with pytest.raises(Gap, match=f"^a/0: the sink {end}"):
        find_new(make_rows(*places, ("b", 0, 1)), **known)


def test_rows_without_an_offset_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="no column 'offset'"):
        find_new(ROWS.drop_columns("offset"))
