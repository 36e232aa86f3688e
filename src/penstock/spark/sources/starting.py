"""Where a query begins and ends: places, as positions in the shards that there are."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidSetting
from penstock.records import Offset, OffsetRange, ShardName
from penstock.spark.sources.columns import ARROW_SCHEMA
from penstock.spark.sources.places import LATEST, Place, Since, Where
from penstock.spark.sources.ranges import Available, Positions
from penstock.spark.sources.store import RecordStore


def find_start(store: RecordStore, where: Where, available: Available) -> Positions:
    """The positions before the first record to read.

    Raises:
        InvalidSetting: The query does not read a shard that is named, an offset lies beyond the next one, or no record was
            staged at a time or later.
    """
    options = store.options
    positions = _find(store, where, available, options.no_later_record)
    beyond = {shard: at for shard, at in positions.items() if at > available[shard].last}
    assigned = store.assigned() if beyond else {}
    for shard, at in beyond.items():
        if at > (newest := max(assigned[shard], available[shard].last)):
            raise InvalidSetting(
                f"{options.source}: startingOffsets of {shard} is {at + 1}, the newest offset there is {newest}"
            )
    return positions


def find_end(store: RecordStore, where: Where, available: Available) -> Positions:
    """The positions of the last record to read.

    Raises:
        InvalidSetting: The query does not read a shard that is named, or an offset has not been assigned yet.
    """
    positions = _find(store, where, available, LATEST)
    for shard, at in positions.items():
        if at > available[shard].last:
            raise InvalidSetting(
                f"{store.options.source}: endingOffsets of {shard} is {at + 1}, the newest offset there is "
                f"{available[shard].last}"
            )
    return positions


def _find(store: RecordStore, where: Where, available: Available, no_later_record: str) -> Positions:
    source = store.options.source
    where.check(available, source)
    places = {shard: where.get(shard) for shard in available}
    times = {shard: p.staged_us for shard, p in places.items() if isinstance(p, Since)}
    first = find_first_since(store, available, times) if times else {}
    if missing := sorted(shard for shard, offset in first.items() if offset is None):
        if no_later_record == "error":
            raise InvalidSetting(
                f"{source}: {missing[0]} has no record staged at the starting time or later; to begin with the next one, give "
                "startingOffsetsByTimestampStrategy=latest"
            )
        first |= {shard: Offset(available[shard].last + 1) for shard in missing}
    return {shard: _position(places[shard], available[shard], first.get(shard)) for shard in places}


def _position(place: Place, available: OffsetRange, first_since: Offset | None) -> int:
    match place:
        case "earliest":
            return available.first - 1
        case "latest":
            return available.last
        case Since():
            assert first_since is not None
            return first_since - 1
        case offset:
            return int(offset) - 1


def find_first_since(
    store: RecordStore, available: Available, times: Mapping[ShardName, int]
) -> dict[ShardName, Offset | None]:
    """The first record of each shard that was staged at its time or later; None if there is none.

    Records are read in their order until one is found: a long transaction's are older than their neighbours, so that no search
    by halves would be right.  The journal tells where to begin; without Postgres, the whole log is read.
    """
    begin = store.sequenced_since(times)
    found: dict[ShardName, Offset | None] = {}
    for shard, staged_us in times.items():
        first = begin.get(shard, available[shard].first)
        found[shard] = (
            None
            if first is None
            else _scan(store, OffsetRange(shard, max(first, available[shard].first), available[shard].last), staged_us)
        )
    return found


def _scan(store: RecordStore, wanted: OffsetRange, staged_us: int) -> Offset | None:
    since = pa.scalar(staged_us, pa.int64()).cast(ARROW_SCHEMA.field("timestamp").type)
    for batch in store.read(wanted) if wanted else ():
        number = pc.index(pc.greater_equal(batch.column("timestamp"), since), True).as_py()
        if number >= 0:
            return Offset(batch.column("offset")[number].as_py())
    return None
