"""What a sink lacks of a micro-batch, by offset: for sinks that commit their last offset of each shard with the records.

Offsets have no holes, so the last one says which records the sink has, whatever Spark knows: a repeated micro-batch, a lost
checkpoint directory or a second query writes nothing twice, and a missing record is noticed.
"""

import logging
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import Gap, InvalidSetting
from penstock.records import Shard, ShardName

log = logging.getLogger("penstock.spark")

PLACE = ("channel", "shard", "offset")


def new_records(rows: pa.Table, position: Callable[[str], int | None]) -> dict[str, pa.Table]:
    """The records of a micro-batch that a sink does not have yet, of each shard, in the order of their offsets.

        def write(frame, batch):
            table = DeltaTable("rides")
            new = new_records(frame.toArrow(), table.transaction_version)
            last = [Transaction(shard, rows["offset"][-1].as_py()) for shard, rows in new.items()]
            if new:
                commit = CommitProperties(app_transactions=last)
                write_deltalake(table, pa.concat_tables(new.values()), mode="append", commit_properties=commit)

    Args:
        rows: All records of the micro-batch, with ``channel``, ``shard`` and ``offset``: filter them afterwards.
        position: The last offset that the sink has of a shard, which it is given as ``rides/0``; None if it has no record of it.

    Raises:
        Gap: Records between the sink's last one and these are missing, or records among them; nothing is to be written.
        InvalidSetting: A column is missing.
    """
    missing = [name for name in PLACE if name not in rows.column_names]
    if missing:
        raise InvalidSetting(f"new_records: the rows have no column {missing[0]!r}; it needs {', '.join(PLACE)}")
    ordered = rows.sort_by([(name, "ascending") for name in PLACE])
    new = {str(shard): _continue(shard, of, position(str(shard))) for shard, of in _split(ordered)}
    if known := rows.num_rows - sum(each.num_rows for each in new.values()):
        log.warning("the sink has %d of %d records already", known, rows.num_rows)
    return {shard: each for shard, each in new.items() if each.num_rows}


def _split(ordered: pa.Table) -> list[tuple[ShardName, pa.Table]]:
    """The rows of each shard."""
    counted = ordered.group_by(["channel", "shard"]).aggregate([([], "count_all")]).to_pylist()
    shards, first = [], 0
    for each in sorted(counted, key=lambda row: (row["channel"], row["shard"])):
        name = ShardName(each["channel"], Shard(each["shard"]))
        shards.append((name, ordered.slice(first, each["count_all"])))
        first += each["count_all"]
    return shards


def _continue(shard: ShardName, rows: pa.Table, last: int | None) -> pa.Table:
    """The rows after ``last``, which are the next ones.

    Raises:
        Gap: One is missing, or there twice.
    """
    new = rows if last is None else rows.filter(pc.greater(rows["offset"], last))
    if not new.num_rows:
        return new
    first, end = new["offset"][0].as_py(), new["offset"][-1].as_py()
    found = (
        f"{shard}: the sink {'has no record' if last is None else f'ends at offset {last}'}, and this micro-batch has "
        f"{new.num_rows:,} of offsets {first} to {end}"
    )
    if last is not None and first != last + 1:
        raise Gap(f"{found}. Read on from where the sink ends: a new checkpointLocation, and startingOffsets")
    if not end - first + 1 == new.num_rows == pc.count_distinct(new["offset"]).as_py():
        raise Gap(f"{found}. Give new_records all records of the micro-batch, each once, and filter the result")
    return new
