"""A stream over any store beside a plain model: whatever comes, is lost or repeated, its micro-batches have each record once, in order."""

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from fixtures.constants import SetConstants
from penstock.records import Offset, OffsetRange, Shard, ShardName
from penstock.spark.releases import ReadAllAvailable, ReadLimit, ReadMaxRows, StartFindingReader
from penstock.spark.sources.ranges import Positions
from penstock.spark.sources.record_columns import ARROW_SCHEMA
from penstock.spark.sources.record_readers import SparkOffset, StreamReader, from_offset
from penstock.spark.sources.record_store import RecordStore
from penstock.spark.sources.source_options import Options

SHARDS = [ShardName("rides", Shard(number)) for number in range(4)]
FIELD = ARROW_SCHEMA.field("offset")


class MemoryStore(RecordStore):
    """Holds numbers in memory; ``known`` are the shards that a query has seen."""

    def __init__(self, **given: str) -> None:
        super().__init__(Options.parse("penstock.log", {"channel": "rides", "shards": "9", **given}, streaming=True))
        self.held = {shard: OffsetRange(shard, Offset(1), Offset(0)) for shard in SHARDS[:2]}
        self.known = [*self.held]

    def change(self, shard: ShardName, first: int, last: int) -> None:
        self.held[shard] = OffsetRange(shard, Offset(first), Offset(last))

    def available(self) -> dict[ShardName, OffsetRange]:
        return {shard: self.held[shard] for shard in self.known}

    def grow(self, positions: Positions) -> bool:
        if len(self.known) == len(self.held) or any(self.held[s].last > positions.get(s, 0) for s in self.known):
            return False
        self.known = [*self.held]
        return True

    def wait(self, positions: Positions, seconds: float) -> None: ...

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        there = self.held[wanted.shard]
        offsets = range(max(wanted.first, there.first), min(wanted.last, there.last) + 1)
        for part in (offsets[at : at + 3] for at in range(0, len(offsets), 3)):
            columns = [
                pa.array([0] * len(part), f.type) if f.name == "offset" else pa.nulls(len(part), f.type)
                for f in ARROW_SCHEMA
            ]
            columns[ARROW_SCHEMA.get_field_index("offset")] = pa.array(part, FIELD.type)
            shard = ARROW_SCHEMA.get_field_index("shard")
            columns[shard] = pa.array([int(wanted.shard.shard)] * len(part), ARROW_SCHEMA.field("shard").type)
            yield pa.RecordBatch.from_arrays(columns, names=ARROW_SCHEMA.names)


def read(reader: StreamReader, start: SparkOffset, end: SparkOffset) -> list[tuple[int, int]]:
    """Shard and offset of the records of a micro-batch, as its tasks read them."""
    rows = [each for task in reader.partitions(start, end) for each in reader.read(task)]
    pairs = (zip(each.column("shard").to_pylist(), each.column("offset").to_pylist(), strict=True) for each in rows)
    return [pair for each in pairs for pair in each]


def stored(offset: SparkOffset) -> SparkOffset:
    """As Spark keeps it."""
    found: SparkOffset = json.loads(json.dumps(offset))
    return found


ALL = ReadAllAvailable()
LIMITS = st.sampled_from([ALL, *map(ReadMaxRows, (1, 2, 5, 40))])
NUMBERS = st.integers(0, len(SHARDS) - 1)


class Query(RuleBasedStateMachine):
    """A query with a checkpoint, and a store that changes under it."""

    @initialize(begins=st.sampled_from(["earliest", "latest"]), there=st.integers(0, 5))
    def begin(self, begins: str, there: int) -> None:
        self.store = MemoryStore(startingOffsets=begins)
        for shard in self.store.known:
            self.store.change(shard, 1, there)
        self.assigned = dict.fromkeys(self.store.known, there)
        self.skipped = dict.fromkeys(self.store.known, there if begins == "latest" else 0)
        self.reader = StreamReader(self.store)
        self.begun = self.at = self.before = self.reader.initialOffset()
        self.last: list[tuple[int, int]] = []
        self.found: list[tuple[int, int]] = []

    def add_to(self, shard: ShardName, count: int) -> None:
        self.assigned[shard] += count
        self.store.change(shard, self.store.held[shard].first, self.assigned[shard])

    def ask(self, limit: ReadLimit) -> SparkOffset:
        """The end of the next micro-batch."""
        return self.reader.latestOffset(self.at, limit)

    def run(self, limit: ReadLimit) -> bool:
        """A micro-batch; false if there is none."""
        end = self.ask(limit)
        rows = read(self.reader, self.at, stored(end))
        if end == self.at:
            assert rows == []
            return False
        self.before, self.last, self.at = self.at, rows, stored(end)
        self.found += rows
        return True

    @rule(number=NUMBERS, count=st.integers(1, 9))
    def add(self, number: int, count: int) -> None:
        if SHARDS[number] in self.assigned:
            self.add_to(SHARDS[number], count)

    @rule(limit=LIMITS)
    def go_on(self, limit: ReadLimit) -> None:
        positions = from_offset(self.at)
        waiting = sum(self.store.held[shard].last - at for shard, at in positions.items())
        known = len(self.store.known)
        rows = self.last if self.run(limit) else []
        if known == len(self.store.known) == len(positions):
            assert len(rows) == min(limit.max_rows if isinstance(limit, ReadMaxRows) else waiting, waiting)

    @rule(number=NUMBERS)
    def evict_what_was_read(self, number: int) -> None:
        """But for what may be repeated."""
        if (shard := SHARDS[number]) in self.store.known:
            there, done = self.store.held[shard], from_offset(self.before).get(shard, 0)
            self.store.change(shard, max(there.first, done + 1), there.last)

    @rule(number=NUMBERS)
    def empty_and_fill_again(self, number: int) -> None:
        if (shard := SHARDS[number]) in self.store.known:
            there = self.store.held[shard]
            self.store.change(shard, 1, 0)
            self.run(ALL)
            self.store.change(shard, there.first, there.last)

    @rule()
    def reshard(self) -> None:
        if len(self.store.held) < len(SHARDS):
            new = SHARDS[len(self.store.held)]
            self.store.change(new, 1, 0)
            self.assigned[new] = self.skipped[new] = 0

    @rule()
    def repeat_after_a_restart(self) -> None:
        """The first micro-batch from where the query has begun, whatever came since."""
        again = StreamReader(self.store)
        start = stored(again.initialOffset()) if self.before == self.begun else self.before
        assert self.at == self.before or read(again, start, self.at) == self.last

    @rule()
    def restart(self) -> None:
        self.reader = StreamReader(self.store)

    @rule(limit=LIMITS)
    def read_what_is_there_now(self, limit: ReadLimit) -> None:
        ends = {shard: self.store.held[shard].last for shard in self.store.known}
        self.reader.prepareForTriggerAvailableNow()
        for shard in ends:
            self.add_to(shard, 1)
        while self.run(limit):
            pass
        assert from_offset(self.at) == ends
        self.restart()

    def teardown(self) -> None:
        """In the end there is nothing that no micro-batch had, or that two had."""
        if not hasattr(self, "reader"):
            return
        while self.run(ALL):
            pass
        for shard, tail in self.assigned.items():
            mine = [at for number, at in self.found if number == int(shard.shard)]
            assert mine == list(range(self.skipped[shard] + 1, tail + 1))


class QueryBefore42(Query):
    """The same, as Spark calls readers before 4.2: it says no start, and no limit."""

    driven: StreamReader | None = None

    def ask(self, limit: ReadLimit) -> SparkOffset:
        if self.driven is not self.reader:
            self.driven, self.caller = self.reader, StartFindingReader(self.reader)
            if self.at != self.begun:
                self.caller.partitions(self.at, self.at)
        self.reader.getDefaultReadLimit = lambda: limit  # type: ignore[method-assign]
        end: SparkOffset = self.caller.latestOffset()
        if end != self.at:
            start = self.caller.initialOffset() if self.at == self.begun else self.at
            self.caller.partitions(start, stored(end))
        return end

    @rule()
    def restart(self) -> None:
        """Once there is a checkpoint: a query without one begins anew."""
        if self.at != self.begun:
            super().restart()


@pytest.mark.parametrize("query", [Query, QueryBefore42])
def test_each_record_is_in_one_micro_batch_in_the_order_of_its_shard(
    query: type[Query], set_constants: SetConstants
) -> None:
    """Guarantees 1 and 6."""
    set_constants("spark.sources.record_readers", GROWS_AFTER_S=0.0)
    run_state_machine_as_test(query, settings=settings(max_examples=60, stateful_step_count=25, derandomize=True))
