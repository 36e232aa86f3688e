"""Every fault that can be made with a record is found, at either end: alone, and beside another one.

Alone, it is the only reason why a range is not equal as a whole; beside another one, the records of the range are compared one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import redis

from fixtures.constants import SetConstants
from fixtures.flow import entry_of_a_record
from fixtures.verifying import Verify
from penstock import Ick, Log, Queue
from penstock.batches.columns import Columns
from penstock.batches.entry import FIELDS
from penstock.channels.batch_outcomes import Batch
from penstock.channels.log.appending import append_together
from penstock.channels.log.stream_entries import NAMES
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.records import Epoch, Offset, Place, Shard, ShardName
from penstock.streaming import tick
from penstock.streaming.publisher import Publisher
from penstock.verifying import bounds, verification
from penstock.verifying.comparing import FindingKind, VerificationRange
from penstock.verifying.verification import Verified

SHARD = ShardName("things", Shard(0))
STREAM = log_keys("penstock", SHARD).stream
TICKS, RECORDS = 5, 10
CHANNELS: dict[str, Log | Ick | Queue] = {
    "plain": Log("things", shards=1, entries="plain"),
    "packed": Log("things", shards=1),
    "ick": Ick("things", shards=1),
    "queue": Queue("things", shards=1),
}
STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
SELECT 'things', 0, 'k' || n, 'insert', 'thing', to_jsonb(n) FROM generate_series(1, 2) n
"""
READ = """
SELECT id, key, action, object, data::text, coalesce(headers::text, ''), (extract(epoch FROM created_at) * 1000000)::bigint
FROM penstock.staged_records ORDER BY id
"""

Fields = dict[bytes, bytes]
Wrong = tuple[FindingKind, str, int, int]
"""Kind, where, offset and count of a finding."""


@dataclass(frozen=True)
class World:
    """Ten records in five ticks, and their log if they have one; Icks and queues have no entries to compare."""

    kind: str
    connection: Connection
    client: redis.Redis
    verified: Verify
    rows: Sequence[Any]

    @property
    def is_log(self) -> bool:
        return self.kind in {"plain", "packed"}

    def fill(self, order: Sequence[int] = range(1, RECORDS + 1)) -> None:
        """Has the log hold the records in an order, two in an entry."""
        self.client.flushall()
        for first in range(1, RECORDS + 1, 2) if self.is_log else ():
            rows = [self.rows[order[at - 1] - 1] for at in (first, first + 1)]
            batch = Batch(SHARD, Epoch(1), Offset(first), first == 1, Columns.pack(rows))
            append_together(self.client, "penstock", [batch.stored_as("plain" if self.kind == "plain" else "none")])

    def execute(self, statement: str, at: int) -> None:
        self.connection.execute(statement.encode(), {"id": self.rows[at - 1][0], "first": first_of_tick(at)})

    def rewrite(self, change: Callable[[bytes, Fields], Fields]) -> None:
        """Writes the log's entries again, with other fields."""
        entries: Any = self.client.xrange(STREAM)
        self.client.delete(STREAM)
        for entry_id, fields in entries:
            changed: Any = change(entry_id, fields)
            self.client.xadd(STREAM, changed, id=entry_id)

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Whatever is done in the block is undone in Postgres, and begins with a whole log."""
        self.fill()
        with self.connection.transaction(force_rollback=True):
            yield


@pytest.fixture
def world(request: pytest.FixtureRequest, connection: Connection, redis_client: redis.Redis, verified: Verify) -> World:
    kind = getattr(request, "param", "plain")
    register_channel(Store(connection), CHANNELS[kind])
    for _ in range(TICKS):
        connection.execute(STAGE)
        tick(Store(connection))
    made = World(kind, connection, redis_client, verified, connection.execute(READ).fetchall())
    made.fill()
    return made


def first_of_tick(at: int) -> int:
    return at - (at - 1) % 2


def read_findings(done: Verified) -> list[Wrong]:
    assert {kind: sum(each.count for each in done.findings if each.kind is kind) for kind in done.counts} == done.counts
    return sorted((each.kind, each.where, each.offset, each.count) for each in done.findings)


Defect = Callable[[World, int], list[Wrong]]
"""Makes a fault with the record at an offset, and says what is to be found."""


def staged(change: str, kind: FindingKind | None, where: str = "staged") -> Defect:
    """A fault of a staged row; without a kind, one that is found by the log alone."""

    def make(world: World, at: int) -> list[Wrong]:
        world.execute(f"UPDATE penstock.staged_records SET {change} WHERE id = %(id)s", at)
        if kind is None:
            return [(FindingKind.CHANGED, "log", at, 1)] if world.is_log else []
        return [(kind, where, at, 1)]

    return make


def gone(world: World, at: int) -> list[Wrong]:
    """What is done has left the staged records of a queue."""
    world.execute("DELETE FROM penstock.staged_records WHERE id = %(id)s", at)
    return [] if world.kind == "queue" else [(FindingKind.MISSING, "staged", at, 1)]


def exchanged(world: World, at: int) -> list[Wrong]:
    """The journal has a tick in another order than a sequencer writes it, and the log follows it."""
    first = first_of_tick(at)
    order = [*range(1, RECORDS + 1)]
    order[first - 1], order[first] = first + 1, first
    world.fill(order)
    world.execute(
        "UPDATE penstock.journal SET record_ids = ARRAY[record_ids[2], record_ids[1]] WHERE first_offset = %(first)s",
        at,
    )
    return [(FindingKind.INVERTED, "journal", first + 1, 1)]


EVERYWHERE: dict[str, Defect] = {
    "its staged row is gone": gone,
    "its staged row is of another shard": staged("shard = 1", FindingKind.CHANGED),
    "its staged row is of another channel": staged("channel = 'others'", FindingKind.CHANGED),
    "its staged row has another key": staged("key = 'other'", None),
    "its staged row has another action": staged("action = 'other'", None),
    "its staged row has another object": staged("object = 'other'", None),
    "its staged row has another payload": staged("data = '0'", None),
    "its staged row has headers": staged("headers = '{}'", None),
    "its staged row has another time": staged("created_at = created_at + interval '1 microsecond'", None),
    "it stands at the place of the other one of its tick": exchanged,
}


def entry_gone(world: World, at: int) -> list[Wrong]:
    if world.kind == "plain":
        world.client.xdel(STREAM, f"{at}-0")
        return [(FindingKind.MISSING, "log", at, 1)]
    world.client.xdel(STREAM, f"{first_of_tick(at) + 1}-0")
    return [(FindingKind.MISSING, "log", first_of_tick(at), 2)]


def entry_damaged(world: World, at: int) -> list[Wrong]:
    first = first_of_tick(at)
    world.rewrite(lambda entry_id, fields: fields | {FIELDS[-1]: b"?"} if entry_id == b"%d-0" % (first + 1) else fields)
    return [(FindingKind.DAMAGED, "log", first, 2)]


def entry(kind: FindingKind, change: Callable[[Fields], Fields]) -> Defect:
    def make(world: World, at: int) -> list[Wrong]:
        world.rewrite(lambda entry_id, fields: change(fields) if entry_id == b"%d-0" % at else fields)
        return [(kind, "log", at, 1)]

    return make


def one_more(world: World, at: int) -> list[Wrong]:
    """A copy of it at an id that is none of a record's."""
    entries: Any = world.client.xrange(STREAM)
    world.client.delete(STREAM)
    for entry_id, fields in entries:
        world.client.xadd(STREAM, fields, id=entry_id)
        if entry_id == b"%d-0" % at:
            world.client.xadd(STREAM, fields, id=f"{at}-1")
    return [(FindingKind.DOUBLED, "log", at, 1)]


def at_another_id(world: World, at: int) -> list[Wrong]:
    """It is there, but not where it belongs."""
    one_more(world, at)
    world.client.xdel(STREAM, f"{at}-0")
    return [(FindingKind.INVERTED, "log", at, 1), (FindingKind.MISSING, "log", at, 1)]


def put(name: bytes, value: bytes) -> Callable[[Fields], Fields]:
    return lambda fields: fields | {name: value}


def rename(name: bytes) -> Callable[[Fields], Fields]:
    return lambda fields: {b"other" if each == name else each: value for each, value in fields.items()}


OF_PLAIN_ENTRIES: dict[str, Defect] = {
    **{f"its entry has another {name.decode()}": entry(FindingKind.CHANGED, put(name, b"7")) for name in NAMES[1:]},
    **{f"its entry has no {name.decode()}": entry(FindingKind.INVERTED, rename(name)) for name in NAMES[1:]},
    "its entry has no id": entry(FindingKind.SURPLUS, rename(b"id")),
    "its entry is of an unknown record": entry(FindingKind.SURPLUS, put(b"id", b"999999")),
    "its entry has a field more": entry(FindingKind.INVERTED, put(b"more", b"7")),
    "its fields are in another order": entry(FindingKind.INVERTED, lambda fields: dict(reversed(fields.items()))),
    "there is an entry more": one_more,
    "its entry has another id": at_another_id,
    "there is an entry more, and none before it": lambda world, at: (
        (entry_gone(world, at - 1) if at > 1 else []) + one_more(world, at)
    ),
    # It is missing from the staged rows, and not from its place in the log.
    "there is an entry more, and no staged row": lambda world, at: gone(world, at) + one_more(world, at),
}


def faults(kind: str) -> dict[str, Defect]:
    of_logs = {"its entry is gone": entry_gone} if kind in {"plain", "packed"} else {}
    of_packed: dict[str, Defect] = {"its entry is damaged": entry_damaged} if kind == "packed" else {}
    return EVERYWHERE | of_logs | of_packed | (OF_PLAIN_ENTRIES if kind == "plain" else {})


def another(world: World, at: int) -> list[Wrong]:
    """A fault of another kind."""
    if world.is_log:
        return entry_gone(world, at)
    world.execute("UPDATE penstock.staged_records SET channel = 'others' WHERE id = %(id)s", at)
    return [(FindingKind.CHANGED, "staged", at, 1)]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("world", CHANNELS, indirect=True)
def test_a_fault_is_found_alone_and_beside_another(
    world: World, monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(verification, "compare", None)  # what is right is not compared one by one
        assert read_findings(world.verified()) == []
    found, expected = {}, {}
    for name, make in faults(world.kind).items():
        for at in (1, RECORDS):
            with world.as_it_was():
                wrong = make(world, at)
                wrong += another(world, 5) if beside else []
                done = world.verified()
                found[name, at], expected[name, at] = read_findings(done), sorted(wrong)
                for each in done.findings:
                    if each.kind in {FindingKind.CHANGED, FindingKind.MISSING} and each.count == 1:
                        assert each.record == world.rows[each.offset - 1][0], (name, at)

    assert found == expected


@pytest.mark.parametrize("world", ["packed"], indirect=True)
def test_a_damaged_entry_is_counted_once_whatever_is_read_at_a_time(world: World, set_constants: SetConstants) -> None:
    """Its records that lie in the verified range are."""
    entry_damaged(world, 3)
    for at_a_time, start, counts in (
        (1, 1, (1, 1)),
        (2, 1, (2,)),
        (3, 1, (1, 1)),
        (4, 1, (2,)),
        (9, 4, (1,)),
        (9, 5, ()),
    ):
        set_constants("verifying.verification", OFFSETS_A_READ=at_a_time)
        done = read_findings(world.verified(start=Offset(start)))
        assert done == [(FindingKind.DAMAGED, "log", 5 - sum(counts[n:]), counts[n]) for n in range(len(counts))]


@pytest.mark.parametrize("world", ["ick", "queue"], indirect=True)
def test_two_rows_of_the_journal_that_hold_an_offset_and_leave_another_are_found(world: World) -> None:
    """There are as many offsets as there should be."""
    world.execute("UPDATE penstock.journal SET first_offset = 2, last_offset = 3 WHERE first_offset = %(first)s", 3)

    assert read_findings(world.verified()) == [
        (FindingKind.DOUBLED, "journal", 2, 1),
        (FindingKind.MISSING, "journal", 4, 1),
    ]


@pytest.mark.parametrize("world", ["ick"], indirect=True)
def test_duplicates_and_disorder_are_counted_within_the_verified_range(world: World) -> None:
    """The first tick and the last one have each other's places, and then the same records."""
    first, last = [[row[0] for row in tick_rows] for tick_rows in (world.rows[:2], world.rows[-2:])]
    place = "UPDATE penstock.journal SET record_ids = %s WHERE first_offset = %s"
    for ids, at in ((last, 1), (first, RECORDS - 1)):
        world.connection.execute(place, [ids, at])
    overtaken = {start: world.verified(start=Offset(start)).overtaken for start in (1, 2, 3, RECORDS - 1, RECORDS)}
    assert overtaken == {1: 4, 2: 3, 3: 2, RECORDS - 1: 0, RECORDS: 0}
    with world.as_it_was():
        assert another(world, 5) == read_findings(world.verified()), (
            "whatever else is wrong, an order of two ticks is not"
        )

    world.connection.execute(place, [first, 1])
    twice = {start: world.verified(start=Offset(start)).counts[FindingKind.DOUBLED] for start in (1, 2)}
    assert twice == {1: 2, 2: 1}
    assert FindingKind.DOUBLED not in world.verified(start=Offset(3)).counts


@pytest.mark.parametrize(("elsewhere", "overtaken"), [("'others', 0", 0), ("'things', 1", 0), ("'things', 0", 2)])
def test_newer_records_of_the_same_keys_overtake_none_elsewhere(world: World, elsewhere: str, overtaken: int) -> None:
    """They come before all that are older."""
    world.connection.execute(
        "UPDATE penstock.journal SET first_offset = first_offset + 10, last_offset = last_offset + 10"
    )
    world.connection.execute(STAGE.replace("'things', 0", elsewhere).encode())
    tick(Store(world.connection))
    world.connection.execute(
        "UPDATE penstock.journal SET first_offset = 1, last_offset = 2 WHERE record_ids[1] > %s", [world.rows[-1][0]]
    )

    others = (ShardName("others", Shard(0)), ShardName("things", Shard(1)))
    assert world.verified(declared=others).overtaken == overtaken


@pytest.mark.parametrize("world", CHANNELS, indirect=True)
def test_a_staged_row_of_another_shard_is_right_once_the_number_of_shards_was_changed(world: World) -> None:
    """That of its own channel: the journal alone decides then.  Of another channel, it is wrong still."""
    register_channel(Store(world.connection), Log("others", shards=1))
    world.execute("UPDATE penstock.staged_records SET shard = 2 WHERE id = %(id)s", 2)
    for resharded, found in (("others", [(FindingKind.CHANGED, "staged", 2, 1)]), ("things", [])):
        change = "UPDATE penstock.channels SET generations = '{2}', first_shard = 1 WHERE channel = %s"
        world.connection.execute(change, [resharded])
        assert read_findings(world.verified()) == found

    world.execute("UPDATE penstock.staged_records SET channel = 'others' WHERE id = %(id)s", 5)
    assert read_findings(world.verified()) == [(FindingKind.CHANGED, "staged", 5, 1)]


@pytest.mark.parametrize("world", CHANNELS, indirect=True)
def test_a_verification_begins_at_the_offset_the_place_or_the_time_that_is_given(world: World) -> None:
    """A place is of its shard alone; a time is that of a tick, to the microsecond."""
    [*_, (last_tick,)] = world.connection.execute("SELECT created_at FROM penstock.journal ORDER BY first_offset")
    starts = {
        None: RECORDS,
        Offset(0): RECORDS,
        Offset(1): RECORDS,
        Offset(2): RECORDS - 1,
        Offset(RECORDS): 1,
        Offset(RECORDS + 1): 0,
        Place(SHARD, Offset(1)): RECORDS,
        Place(SHARD, Offset(4)): RECORDS - 3,
        str(last_tick): 2,
        str(last_tick + timedelta(microseconds=1)): 0,
        str(last_tick - timedelta(microseconds=1)): 2,
    }
    assert {start: world.verified(start=start).records for start in starts} == starts
    for at, is_found in ((3, True), (4, True), (5, False)):
        with world.as_it_was():
            another(world, 4)
            assert bool(read_findings(world.verified(start=Offset(at)))) == is_found


PAYLOADS = (
    "null",
    '""',
    "{}",
    "0.10",
    "-0",
    "9" * 40,
    "1e400",
    '{"a": null, "": [1.0]}',
    '"\\u0001 \u00fc\U0001f680 \\" \\\\"',
)
HEADERS = (None, "{}", '{"a": ""}')
TEXTS = (" ", "NULL", "a\nb", "\u00fc", "\U0001f680", "a'b", "0")
TIMES = (
    "1970-01-01",
    "2026-01-01 00:00:00.000001",
    "1969-12-31 23:59:59.999999",
    "2199-12-31 23:59:59.999999",
    "1900-01-01",
)


@pytest.mark.parametrize("world", ["plain", "packed"], indirect=True)
def test_a_record_of_any_values_is_the_one_that_was_published(world: World) -> None:
    """The publisher and the verification have each a statement of their own."""
    rows = [(each % len(TEXTS), each) for each in range(max(map(len, (PAYLOADS, HEADERS, TEXTS, TIMES))))]
    for text, number in rows:
        values = (TEXTS[text], PAYLOADS[number % 9], HEADERS[number % 3], f"{TIMES[number % 5]}+00")
        world.connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers, created_at) "
            "SELECT 'things', 0, k, k, k, d::jsonb, h::jsonb, t::timestamptz FROM (SELECT %s, %s, %s, %s) r (k, d, h, t)",
            values,
        )
    tick(Store(world.connection))
    publisher = Publisher(Store(world.connection), world.client, epoch=Epoch(1))
    publisher.refresh()
    assert publisher.publish().added == len(rows)

    done = world.verified()
    assert (read_findings(done), done.records, done.unpublished) == ([], RECORDS + len(rows), 0)


SECOND = ShardName("things", Shard(1))
CHECKPOINT = "INSERT INTO penstock.checkpoints (consumer, channel, shard, \"offset\", epoch) VALUES ('reader', 'things', 0, 10, 1)"


@pytest.mark.parametrize("registered", [0, 1, 2])
@pytest.mark.parametrize("declared", [(SHARD,), (SHARD, SECOND)])
def test_a_record_of_a_shard_that_nobody_reads_is_found(
    world: World, registered: int, declared: Sequence[ShardName]
) -> None:
    """What is registered counts; of a channel that is not, what is declared."""
    world.connection.execute(STAGE.replace("0,", "1,").replace("(1, 2)", "(1, 1)").encode())
    tick(Store(world.connection))
    change = (
        "DELETE FROM penstock.channels" if not registered else f"UPDATE penstock.channels SET shards = {registered}"
    )
    world.connection.execute(change.encode())
    world.connection.execute(f"{CHECKPOINT}, ('another', 'others', 0, 0, 1)".encode())
    done = world.verified(declared=(*declared, ShardName("others", Shard(0))))
    found = [(each.where, each.offset, each.count) for each in done.findings if each.shard]

    is_read = registered == 2 or (not registered and SECOND in declared)
    assert found == [("consumer reader", 1, 1)] + [("consumers", 1, 1)] * (not is_read)


def test_a_log_that_is_beyond_its_journal_makes_up_for_no_other_one(world: World) -> None:
    """What is not published yet is counted by shard."""
    world.connection.execute(STAGE.replace("0,", "1,").encode())
    world.connection.execute("UPDATE penstock.channels SET shards = 2")
    tick(Store(world.connection))
    fields: Any = entry_of_a_record(999_999)
    world.client.xadd(STREAM, fields, id=f"{RECORDS + 1}-0")
    done = world.verified()

    assert (done.unpublished, done.records) == (2, RECORDS + 2)
    assert read_findings(done) == [(FindingKind.SURPLUS, "log", RECORDS + 1, 1)]


def test_a_log_may_come_up_to_a_checkpoint_within_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that began with the tables stands at the end of the journal, and the publisher is on its way."""
    world.connection.execute(CHECKPOINT.replace("VALUES", "VALUES ('before', 'things', 0, 0, 1),").encode())
    world.client.flushall()
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        world.fill()

    monkeypatch.setattr(bounds, "sleep", wait)

    for _ in range(2):
        assert read_findings(world.verified()) == []
    assert len(waits) == 1, "none for a log that is there"


def test_what_is_not_kept_is_counted(world: World, set_constants: SetConstants) -> None:
    """Of which the places in the journal are not looked up."""
    set_constants("verifying.verification", FINDINGS_KEPT=2)
    world.rewrite(
        lambda entry_id, fields: (
            fields | {b"data": b"7"} if entry_id in {b"1-0", b"2-0", b"3-0"} else fields | {b"id": b"1"}
        )
    )
    done = world.verified()

    assert len(done.findings) == 2
    assert done.counts == {FindingKind.CHANGED: 3, FindingKind.SURPLUS: 7}


def test_a_repeated_entry_does_not_fill_the_gap_of_another_log(world: World) -> None:
    """The log before it lacks records of higher offsets."""
    another = ShardName("another", Shard(0))
    register_channel(Store(world.connection), Log("another", shards=1, entries="plain"))
    for _ in range(TICKS):
        world.connection.execute(STAGE.replace("things", "another").encode())
        tick(Store(world.connection))
    rows = world.connection.execute(READ.replace("records ", "records WHERE channel = 'another' ").encode()).fetchall()
    last = Batch(another, Epoch(1), Offset(RECORDS - 1), True, Columns.pack(rows[-2:]))
    append_together(world.client, "penstock", [last.stored_as("plain")])
    one_more(world, 2)

    found = sorted((each.channel, each.kind, each.offset) for each in world.verified().findings)
    assert found == [("another", FindingKind.MISSING, 1), ("things", FindingKind.DOUBLED, 2)]


def test_the_largest_record_of_a_range_is_found_beside_another_log_of_other_ticks(
    world: World, set_constants: SetConstants
) -> None:
    world.connection.execute(
        "INSERT INTO penstock.journal (channel, shard, first_offset, last_offset, record_ids, epoch) "
        "SELECT 'others', shard, first_offset + 1, last_offset + 1, record_ids, epoch FROM penstock.journal"
    )
    set_constants("verifying.verification", BYTES_A_READ=100)

    def read_at_a_time() -> int:
        return verification.offsets_a_read(Store(world.connection), VerificationRange(SHARD, 1, 2, RECORDS))

    assert read_at_a_time() > 1
    world.execute("UPDATE penstock.staged_records SET data = to_jsonb(repeat('x', 200)) WHERE id = %(id)s", 2)
    assert read_at_a_time() == 1
