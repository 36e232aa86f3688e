"""Spark's filters on records: which shards and offsets a batch need not read, and which rows it need not hand over.

Spark checks every row again, so a filter that is not understood here is left out.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from penstock.records import Offset, OffsetRange, ShardName
from penstock.spark.sources.columns import ARROW_SCHEMA

_COMPARES: dict[type[Filter], Callable[[Any, Any], Any]] = {
    EqualTo: pc.equal,
    EqualNullSafe: pc.equal,
    GreaterThan: pc.greater,
    GreaterThanOrEqual: pc.greater_equal,
    LessThan: pc.less,
    LessThanOrEqual: pc.less_equal,
}
_MATCHES: dict[type[Filter], Callable[[Any, str], Any]] = {
    StringStartsWith: lambda column, text: pc.starts_with(column, pattern=text),
    StringEndsWith: lambda column, text: pc.ends_with(column, pattern=text),
    StringContains: lambda column, text: pc.match_substring(column, pattern=text),
}
_FROM = (EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual)
_TO = (EqualTo, EqualNullSafe, LessThan, LessThanOrEqual)


class PushFilters:
    """The method ``pushFilters`` of a reader, which a session without filter pushdown accepts too.

    Filters do nothing without the option ``pushFilters``: Spark keeps one plan for a DataFrame, that of the filters that were
    pushed last.  Two filters on one DataFrame would lose rows, in one query or one after the other.

    PySpark refuses a reader that overrides the method unless ``spark.sql.python.filterPushdown.enabled`` is set, and does not
    call it otherwise.  A session that has found the sources by itself does not have that setting.
    """

    def __init__(self, push: Callable[[Any, list[Filter]], Iterable[Filter]]) -> None:
        self._push = push

    def __get__(self, reader: Any, _owner: type) -> Callable[[list[Filter]], Iterable[Filter]]:
        def push(filters: list[Filter]) -> Iterable[Filter]:
            return self._push(reader, filters)

        push.__func__ = DataSourceReader.pushFilters  # type: ignore[attr-defined]  # what PySpark compares
        return push


def narrow_ranges(ranges: Iterable[OffsetRange], filters: Sequence[Filter]) -> list[OffsetRange]:
    """The ranges without the shards and offsets that no row can pass from."""
    first, last = _bounds("offset", filters)
    narrowed = (
        OffsetRange(
            each.shard,
            each.first if first is None else Offset(max(each.first, first)),
            each.last if last is None else Offset(min(each.last, last)),
        )
        for each in ranges
        if _may_pass(each.shard, filters)
    )
    return [each for each in narrowed if each]


def find_staged_since(filters: Sequence[Filter]) -> int | None:
    """The time before which no row was staged that passes, in microseconds since 1970; None if the filters set none."""
    found = [_scalar("timestamp", value) for value, _ in _values("timestamp", filters, _FROM)]
    values = [each.cast(pa.int64()).as_py() for each in found if each is not None]
    return max(values, default=None)


def apply_filters(batch: pa.RecordBatch, filters: Sequence[Filter]) -> pa.RecordBatch:
    """The rows that pass all filters that are understood."""
    for each in filters:
        if (mask := _mask(batch, each)) is not None:
            batch = batch.filter(mask)
    return batch


def _bounds(column: str, filters: Sequence[Filter]) -> tuple[int | None, int | None]:
    """The least and the greatest whole number that a column of a row that passes may have."""
    least = [value + isinstance(f, GreaterThan) for value, f in _values(column, filters, _FROM)]
    most = [value - isinstance(f, LessThan) for value, f in _values(column, filters, _TO)]
    for values, _ in _values(column, filters, (In,)):
        if whole := [value for value in values if value is not None]:
            least.append(min(whole))
            most.append(max(whole))
    return max(least, default=None), min(most, default=None)


def _may_pass(shard: ShardName, filters: Sequence[Filter]) -> bool:
    """Whether a filter on the channel or the shard excludes all rows of a shard."""
    row = pa.RecordBatch.from_pydict({"channel": [shard.channel], "shard": pa.array([int(shard.shard)], pa.int32())})
    on_shard = [f for f in filters if _column(f) in row.schema.names]
    return bool(apply_filters(row, on_shard).num_rows)


def _mask(batch: pa.RecordBatch, given: Filter) -> Any | None:
    name = _column(given)
    if name not in batch.schema.names or name not in ARROW_SCHEMA.names:
        return None
    column = batch.column(name)
    if isinstance(given, In):
        values = [each for v in given.value if (each := _scalar(name, v)) is not None]
        return pc.is_in(column, value_set=pa.array([v.as_py() for v in values], column.type))
    wanted = getattr(given, "value", None)
    if type(given) in _MATCHES and isinstance(wanted, str):
        return _MATCHES[type(given)](column, wanted)
    value = _scalar(name, wanted)
    compare = _COMPARES.get(type(given))
    return None if compare is None or value is None else compare(column, value)


def _scalar(column: str, value: Any) -> Any | None:
    """The value in the column's type; None if it is null or does not fit."""
    try:
        return None if value is None else pa.scalar(value, ARROW_SCHEMA.field(column).type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return None


def _column(given: Filter) -> str:
    return ".".join(getattr(given, "attribute", ()))


def _values(column: str, filters: Sequence[Filter], kinds: tuple[type[Filter], ...]) -> list[tuple[Any, Filter]]:
    """The values of filters of some kinds on a column, with the filters; without nulls."""
    found = [
        (getattr(each, "value", None), each) for each in filters if isinstance(each, kinds) and _column(each) == column
    ]
    return [(value, each) for value, each in found if value is not None]
