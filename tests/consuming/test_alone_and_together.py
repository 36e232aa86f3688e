"""What has two ways gives the same on both: a shard alone or several together, keys in memory or a range of offsets, all shards or some."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

from penstock import Log, Pipeline
from penstock.consuming.checkpoints import Checkpoint, Checkpoints
from penstock.consuming.dead_lettering import DeadLetters
from penstock.consuming.delivery import Delivered
from penstock.consuming.journals import LocalJournal
from penstock.consuming.log.log_plans import LogPlans, LogRecords
from penstock.consuming.transaction import TransactionPlan
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.journal.journal_reader import journal_bounds, registered_tails
from penstock.records import DEFAULT_SCOPE, Offset, Record, RecordId, Shard, ShardName

FIRST, SECOND = (ShardName("things", Shard(number)) for number in range(2))
NOW = 1_790_000_000_000_000
AT = 5
"""Where the checkpoint is."""


@pytest.fixture
def reader(flow: Pipeline, things: Log) -> Any:
    flow.consumer(reads=things, name="reader")(lambda _session, _records: None)
    return flow.get_consumer("reader")


def make_plans(consumer: Any) -> LogPlans[Record]:
    journal = LocalJournal(consumer)
    return LogPlans(consumer, LogRecords(consumer, DEFAULT_SCOPE, journal), journal)


def make_record(offset: int, key: str = "a") -> Record:
    id_ = RecordId(100 + offset)
    return Record("things", Shard(0), Offset(offset), id_, key, "insert", "thing", "1", "", NOW - offset)


def make_checkpoint(**state: Any) -> Checkpoint:
    return Checkpoint(FIRST, Offset(AT), state.pop("halted", None), "1", 1, NOW, **state)


GOING: dict[str, dict[str, Any]] = {
    "going": {},
    "with letters": {"has_letters": True},
    "before a barrier behind them": {"barrier": Offset(AT + 3)},
}
HELD: dict[str, dict[str, Any]] = {
    "before a barrier among them": {"barrier": Offset(AT + 2)},
    "at a barrier": {"barrier": Offset(AT)},
    "halted": {"halted": "for a test"},
    "paused": {"is_paused": True},
    "waiting for an earlier shard": {"waits_for": Shard(0)},
}
FOLLOWING = {
    "the next ones": (6, 7, 8),
    "the next one": (6,),
    "some that were applied, and the next ones": (4, 5, 6, 7, 8),
    "some that were applied": (4, 5),
}
WITH_A_GAP = {"behind a gap": (7, 8), "a gap among them": (6, 8), "a gap behind what was applied": (5, 7, 8)}


@pytest.mark.parametrize("name", GOING | HELD)
def test_a_shard_is_delivered_together_with_others_as_it_is_alone_or_not_at_all(
    connection: Connection, reader: Any, name: str
) -> None:
    """A shard that something has to be done for first is left to a transaction of its own."""
    write_letters(connection, [("reader", "things", 0, 2, "a", 0)])
    write_journal(connection, FIRST, "aaaaaaaa")
    plans, locked = make_plans(reader), {FIRST: make_checkpoint(**(GOING | HELD)[name])}
    for case, offsets in (FOLLOWING | WITH_A_GAP).items():
        records = [*map(make_record, offsets)]
        with rolled_back(connection):
            alone = plans.plan(FIRST, records)(Store(connection), locked)
            noted = read_letters(connection)
        with rolled_back(connection):
            together = plans.plan_together({FIRST: records})(Store(connection), locked)
            is_left = FIRST not in together.result
            assert read_letters(connection) == (noted if not is_left else LETTER_AS_WRITTEN), case

        fits = name == "before a barrier among them" and max(offsets) <= AT + 2
        assert is_left == ((name in HELD and not fits) or case in WITH_A_GAP), case
        if not is_left:
            assert seen(together, together.result[FIRST]) == seen(alone, alone.result), case


@pytest.mark.parametrize("barrier", [None, AT + 1, AT + 2, AT + 3])
def test_a_gap_is_filled_from_the_journal_up_to_a_barrier(
    connection: Connection, reader: Any, barrier: int | None
) -> None:
    write_journal(connection, FIRST, "aaaaaaaa")
    locked = {FIRST: make_checkpoint(barrier=barrier)}
    delivered = make_plans(reader).plan(FIRST, [make_record(AT + 3)])(Store(connection), locked).result

    assert [record.offset for record in delivered.missing] == [AT + 1, AT + 2][: (barrier or 99) - AT]


@pytest.mark.parametrize("letters", [(0, 0), (2, 0), (0, 3)])
@pytest.mark.parametrize("passed", [False, True])
def test_a_shard_of_a_later_generation_has_the_letters_of_earlier_ones_and_waits_for_them(
    connection: Connection, reader: Any, *, passed: bool, letters: tuple[int, int]
) -> None:
    connection.execute(
        "INSERT INTO penstock.channels (channel, kind, shards, generations, first_shard, keep) "
        "VALUES ('things', 'log', 1, '{1}', 1, '1 h')"
    )
    write_journal(connection, FIRST, "aaa")
    for shard, (dead, offset) in enumerate(zip(letters, (3 if passed else 2, 0), strict=True)):
        connection.execute(
            'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", dead, epoch) '
            "VALUES ('reader', 'things', %s, %s, %s, 1)",
            [shard, offset, dead],
        )
    found = Checkpoints(reader).lock(Store(connection), [FIRST, SECOND])

    has = {shard: (each.has_letters, each.waits_for) for shard, each in found.items()}
    assert has == {FIRST: (letters[0] > 0, None), SECOND: (True, None if passed else FIRST.shard)}


LETTER_AS_WRITTEN = {("reader", "things", 0, 2): (None, 0)}


def seen(plan: TransactionPlan[Any], delivered: Delivered) -> tuple[Any, ...]:
    advances = [each for each in plan.advances if each.to > each.locked.offset or each.skipped]
    return [record.offset for record in plan.items or ()], advances, delivered


@contextmanager
def rolled_back(connection: Connection) -> Iterator[None]:
    with connection.transaction(force_rollback=True):
        yield


Letter = tuple[str, str, int, int, str, int]
"""Consumer, channel, shard, offset and key of a dead letter, and the offset of the later record that it knows of."""


def write_letters(connection: Connection, letters: Sequence[Letter]) -> None:
    for consumer, channel, shard, offset, key, later in letters:
        connection.execute(
            'INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, staged_at, '
            "reason, attempts, later_offset) VALUES (%s, %s, %s, %s, 1, %s, 'a', 'o', '1', now(), 'test', 1, %s)",
            [consumer, channel, shard, offset, key, later],
        )


def read_letters(connection: Connection) -> dict[tuple[str, str, int, int], tuple[int | None, int]]:
    """What each dead letter knows of a later record: its shard and its offset."""
    rows = connection.execute(
        'SELECT consumer, channel, shard, "offset", later_shard, later_offset FROM penstock.dead_letters'
    )
    return {(*where, offset): (shard if later else None, later) for *where, offset, shard, later in rows}


def write_journal(connection: Connection, shard: ShardName, keys: str) -> None:
    """Stages a record for each letter, and journals them, three in a row."""
    staged = connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT %s, %s, k, 'insert', 'thing', '1' FROM unnest(%s::text[]) WITH ORDINALITY n (k, at) ORDER BY at RETURNING id",
        [shard.channel, shard.shard, [*keys]],
    ).fetchall()
    ids = [id_ for (id_,) in staged]
    for first in range(0, len(ids), 3):
        some = ids[first : first + 3]
        connection.execute(
            "INSERT INTO penstock.journal (channel, shard, first_offset, last_offset, record_ids, epoch) VALUES (%s, %s, %s, %s, %s, 1)",
            [shard.channel, shard.shard, first + 1, first + len(some), some],
        )


KEYS = "abacbada"
LETTERS: list[Letter] = [
    ("reader", "things", 0, 1, "a", 0),
    ("reader", "things", 0, 2, "b", 3),
    ("reader", "things", 0, 6, "d", 0),
    ("reader", "things", 1, 1, "a", 0),
    ("reader", "things", 1, 4, "c", 0),
    ("reader", "things", 2, 1, "a", 0),
    ("reader", "others", 0, 1, "b", 0),
    ("other", "things", 0, 5, "b", 0),
]
RANGES = [(1, 8), (1, 1), (3, 3), (4, 4), (5, 8), (2, 3), (6, 7), (8, 8), (9, 12)]


@pytest.mark.parametrize("generations", ["{}", "{1}"])
def test_letters_of_the_keys_of_records_are_found_by_keys_and_by_a_range_of_offsets(
    connection: Connection, reader: Any, generations: str
) -> None:
    """Who has no records in memory asks by their offsets.  Of a channel that was resharded, earlier shards count too."""
    connection.execute(
        "INSERT INTO penstock.channels (channel, kind, shards, generations, first_shard, keep) VALUES ('things', 'log', 2, %s, 2, '1 h')",
        [generations],
    )
    for shard in (FIRST, SECOND):
        write_journal(connection, shard, KEYS)
    write_letters(connection, LETTERS)
    letters = DeadLetters(reader)
    for shard, (first, last) in product((FIRST, SECOND), RANGES):
        offsets = range(first, min(last, len(KEYS)) + 1)
        keys = [KEYS[offset - 1] for offset in offsets]
        shards = range(shard.shard + 1) if generations != "{}" else (shard.shard,)
        known = [each for each in LETTERS if each[:2] == ("reader", "things") and each[2] in shards and each[4] in keys]
        parked = {each[4] for each in known}
        found = letters.parked_records(Store(connection), shard, Offset(first), Offset(last))

        assert letters.parked_keys(Store(connection), shard, keys) == parked
        assert [each.offset for each in found] == [at for at, key in zip(offsets, keys, strict=True) if key in parked]
        assert [each.key for each in found] == [key for key in keys if key in parked]
        later = {each[:4]: (shard.shard, first + keys.index(each[4])) for each in known if not each[5]}
        with rolled_back(connection):
            before = read_letters(connection)
            letters.note_later(Store(connection), shard, keys, [Offset(offset) for offset in offsets])
            noted = read_letters(connection)
        with rolled_back(connection):
            letters.note_later_range(Store(connection), shard, Offset(first), Offset(last))
            assert read_letters(connection) == noted
        assert noted == before | {at: to for at, to in later.items() if (at[2], at[3]) < to}


def test_the_ends_of_the_journal_are_the_same_however_they_are_asked_for(connection: Connection) -> None:
    """Of all shards, of some, and of those that are registered."""
    shards = [ShardName(channel, Shard(number)) for channel, number in product(("a", "things", "z"), (0, 1, 7))]
    ends = {shard: length for shard, length in zip(shards, (0, 1, 3, 4, 7, 2, 0, 0, 5), strict=True) if length}
    for shard, length in ends.items():
        write_journal(connection, shard, "k" * length)
    connection.execute("DELETE FROM penstock.journal WHERE first_offset = 1 AND channel = 'things' AND shard < 7")
    connection.execute(
        "INSERT INTO penstock.channels (channel, kind, shards, keep) VALUES ('things', 'log', 2, '1 h'), ('z', 'log', 9, '1 h')"
    )
    begins = {shard: 4 if shard in (FIRST, SECOND) else 1 for shard in ends}

    assert journal_bounds(Store(connection)) == {shard: (begins[shard], ends[shard]) for shard in ends}
    some = journal_bounds(Store(connection), shards)
    assert some == {shard: (begins.get(shard, 1), ends.get(shard, 0)) for shard in shards}
    assert registered_tails(Store(connection)) == {FIRST: 4, SECOND: 7, ShardName("z", Shard(7)): 5}
