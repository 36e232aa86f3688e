"""Reading what the journal has and a log lacks, whatever the records and wherever the reading begins."""

import math
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fixtures.constants import SetConstants
from fixtures.flow import drop_limits
from penstock.channels.batch_outcomes import Batch
from penstock.channels.isolation import ShardError
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import DamagedJournal
from penstock.records import Epoch, Offset, Shard, ShardName
from penstock.streaming.unpublished import BATCH_BYTES, unpublished

SHARD = ShardName("things", Shard(0))
EPOCH_START = datetime(1970, 1, 1, tzinfo=UTC)
TIMES = [
    datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999999, UTC),
    *(datetime(year, 1, 1, tzinfo=UTC) + timedelta(microseconds=more) for year in (1900, 2106) for more in (-1, 0, 1)),
    datetime(1, 1, 2, 0, 0, 0, 1, UTC),
    datetime(9999, 12, 30, 23, 59, 59, 999999, UTC),
]


@pytest.fixture(autouse=True)
def _no_limits(connection: Connection) -> None:
    drop_limits(connection)


Row = tuple[int, str, str, str, str, str, int]
"""A record's values, in the order of a batch's columns."""


@dataclass(frozen=True)
class Record:
    """A staged record, by what can differ from its neighbour's."""

    key: str = "k"
    action: str = "insert"
    object: str = "thing"
    data: str = "1"
    headers: str | None = None
    at: datetime = TIMES[0]

    def row(self, id_: int) -> Row:
        us = (self.at - EPOCH_START) // timedelta(microseconds=1)
        return id_, self.key, self.action, self.object, self.data, self.headers or "", us


RECORDS = st.builds(
    Record,
    key=st.sampled_from(["k", "k", "", 'a",\n "b', "ü\\", "null"]),
    action=st.sampled_from(["insert", "insert", "update"]),
    object=st.sampled_from(["thing", "thing", "other"]),
    data=st.sampled_from(["1", "null", '"a\\n[b"', '{"a": [1, 2]}']),
    headers=st.sampled_from([None, None, '{"a": 1}']),
    at=st.sampled_from(TIMES),
)


@dataclass
class World:
    """A journal, and the records that it names."""

    records: list[Record]
    ids: list[int]  # in the order of the journal
    chunks: list[int]  # numbers of records of the journal's rows; the last one goes on
    begins: int = 1  # the journal's first offset
    gone: frozenset[int] = frozenset()  # positions of records whose rows are gone
    lost: int | None = None  # the number of a row of the journal that is gone

    def rows(self) -> dict[int, Row]:
        """The records, by their offsets."""
        pairs = zip(self.ids, self.records, strict=True)
        return {self.begins + place: record.row(id_) for place, (id_, record) in enumerate(pairs)}

    def entries(self) -> list[tuple[int, list[int]]]:
        """The journal's rows: the first offset, and the ids."""
        entries, place, sizes = [], 0, [*self.chunks]
        while place < len(self.ids):
            size = sizes.pop(0) if sizes else len(self.ids)
            entries.append((self.begins + place, self.ids[place : place + size]))
            place += size
        return entries

    def write(self, connection: Connection) -> None:
        connection.execute("TRUNCATE penstock.staged_records, penstock.journal")
        kept = [
            (id_, r.key, r.action, r.object, r.data, r.headers, r.at)
            for place, (id_, r) in enumerate(zip(self.ids, self.records, strict=True))
            if place not in self.gone
        ]
        with connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO penstock.staged_records (id, channel, shard, key, action, object, data, headers, created_at) "
                "OVERRIDING SYSTEM VALUE VALUES (%s, 'things', 0, %s, %s, %s, %s, %s, %s)",
                kept,
            )
            cursor.executemany(
                "INSERT INTO penstock.journal (channel, shard, first_offset, last_offset, record_ids, epoch) "
                "VALUES ('things', 0, %s, %s, %s, 1)",
                [
                    (first, first + len(ids) - 1, ids)
                    for number, (first, ids) in enumerate(self.entries())
                    if number != self.lost
                ],
            )


@st.composite
def worlds(draw: st.DrawFn, *, damaged: bool) -> World:
    records = draw(st.lists(RECORDS, min_size=2, max_size=9))
    ids = sorted(draw(st.sets(st.integers(0, 40), min_size=len(records), max_size=len(records))))
    if draw(st.booleans()):  # committed late
        ids = draw(st.permutations(ids))
    world = World(records, ids, draw(st.lists(st.integers(1, 4), max_size=4)), draw(st.sampled_from([1, 1, 4])))
    if damaged and draw(st.booleans()):
        world.gone = frozenset(draw(st.sets(st.integers(0, len(records) - 1), min_size=1, max_size=3)))
    elif damaged:
        world.lost = draw(st.integers(0, len(world.entries()) - 1))
    return world


def read(
    connection: Connection, world: World, after: int, most: int, *, as_queue: bool = False
) -> tuple[list[Batch], list[ShardError]]:
    """The batches that come after an offset, up to the journal's end; and the errors of the shard."""
    errors: list[ShardError] = []
    reading = unpublished(
        Store(connection),
        {SHARD: Offset(max(world.rows()))},
        {SHARD: Offset(after)},
        epoch=Epoch(3),
        until=math.inf,
        max_records=most,
        queues={SHARD.channel} if as_queue else (),
        on_unusable=lambda _, error: errors.append(error),
    )
    with closing(reading):
        return [*reading], errors


def read_rows(batches: list[Batch]) -> dict[int, Row]:
    return {batch.first + place: row for batch in batches for place, row in enumerate(batch.columns.rows())}


READS = {"after": st.integers(0, 11), "most": st.integers(1, 10), "size": st.sampled_from([BATCH_BYTES, 1, 30, 60])}


@pytest.mark.slow
@settings(max_examples=60)
@example(World([Record(at=TIMES[2]), Record(at=TIMES[3])], [1, 2], []), 0, 9, BATCH_BYTES)
@example(World([Record()] * 9, [*range(9)], []), 0, 9, 1)
@given(world=worlds(damaged=False), **READS)
def test_batches_are_what_the_journal_names_from_any_offset_on(
    connection: Connection, set_constants: SetConstants, world: World, after: int, most: int, size: int
) -> None:
    """Guarantees 2 and 22: in the journal's order, every value to its last digit, in batches of any size."""
    set_constants("streaming.unpublished", BATCH_BYTES=size)
    world.write(connection)
    batches, errors = read(connection, world, after, most)

    assert errors == []
    expected = {offset: row for offset, row in world.rows().items() if offset > after}
    assert read_rows(batches) == expected
    assert all(batch.count <= most and batch.epoch == 3 for batch in batches)
    assert sum(batch.count for batch in batches) == len(expected)
    assert [batch.begins for batch in batches] == [min(expected, default=0) > after + 1, *[False] * len(batches)][
        : len(batches)
    ]


@pytest.mark.slow
@settings(max_examples=60)
@example(World([Record()] * 3, [1, 2, 3], [1, 1], lost=1), 1, 9, BATCH_BYTES)
@example(World([Record()] * 5, [*range(5)], [1, 2], lost=1), 2, 9, BATCH_BYTES)
@given(world=worlds(damaged=True), **READS)
def test_nothing_comes_after_what_the_journal_or_the_table_lacks(
    connection: Connection, set_constants: SetConstants, world: World, after: int, most: int, size: int
) -> None:
    """Guarantee 3: what was published before the damage stays; an offset belongs to one record for ever, or to none."""
    set_constants("streaming.unpublished", BATCH_BYTES=size)
    world.write(connection)
    rows, entries = world.rows(), world.entries()
    missing = {world.begins + place for place in world.gone}
    if world.lost is not None:
        first, ids = entries[world.lost]
        missing = {*range(first, first + len(ids))}
        if world.lost == 0:  # the journal begins later, as after retention
            missing = set()
            rows = {offset: row for offset, row in rows.items() if offset >= first + len(ids)}
    expected = {offset: row for offset, row in rows.items() if offset > after}
    missing = {offset for offset in missing if offset > after}
    if world.lost is not None and not expected.keys() - missing:
        missing = {*missing, max(world.rows())} if after < max(world.rows()) else set()
    batches, errors = read(connection, world, after, most)

    found = read_rows(batches)
    assert found == {offset: expected[offset] for offset in found}
    if not missing:
        assert (len(found), errors) == (len(expected), [])
        return
    assert [*map(type, errors)] == [DamagedJournal]
    assert [*found] == [*expected][: len(found)]
    assert all(offset < min(missing) for offset in found)


@settings(max_examples=20)
@given(world=worlds(damaged=True).filter(lambda world: world.lost is None), **READS)
def test_of_a_queue_a_record_that_is_done_leaves_its_id(
    connection: Connection, set_constants: SetConstants, world: World, after: int, most: int, size: int
) -> None:
    set_constants("streaming.unpublished", BATCH_BYTES=size)
    world.write(connection)
    batches, errors = read(connection, world, after, most, as_queue=True)

    assert errors == []
    for offset, row in read_rows(batches).items():
        is_gone = offset - world.begins in world.gone
        assert row[:2] == (world.rows()[offset][0], None if is_gone else world.rows()[offset][1])
    assert [*read_rows(batches)] == [offset for offset in world.rows() if offset > after]
