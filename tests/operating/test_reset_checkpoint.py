"""Resetting a checkpoint by hand."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fixtures.flow import OpenWorker, Publish, stage_rows
from penstock import Ick, Log, Pipeline, Queue
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.declaring.kinds import Channel
from penstock.errors import Refused, Unknown
from penstock.journal.journal_reader import offsets_since
from penstock.operating.reset import checkpoint
from penstock.operating.reset.checkpoint import reset_checkpoint
from penstock.records import Offset, Record, parse_place
from penstock.streaming import Streamer


@pytest.fixture
def applied() -> list[Record]:
    return []


@pytest.fixture
def reader(flow: Pipeline, things: Log, publish: Publish, open_worker: OpenWorker, applied: list[Record]) -> LogWorker:
    """A consumer that has applied 20 records."""

    @flow.consumer(reads=things, on_poison="halt", attempts=1)
    def reader(_session: Any, records: Sequence[Record]) -> None:
        if any(record.key.startswith("bad") for record in records):
            raise ValueError(records[0].key)
        applied.extend(records)

    publish(20)
    worker = open_worker()
    worker.drain()
    worker.close()
    return worker


def test_without_apply_nothing_moves(connection: Connection, reader: LogWorker) -> None:
    before = connection.execute("SELECT * FROM penstock.checkpoints ORDER BY shard").fetchall()

    moves = reset_checkpoint(Store(connection), "reader", "earliest")

    assert sum(move.again for move in moves) == 20
    assert connection.execute("SELECT * FROM penstock.checkpoints ORDER BY shard").fetchall() == before


def test_after_a_reset_to_earliest_everything_is_applied_again(
    connection: Connection, reader: LogWorker, applied: list[Record]
) -> None:
    first = list(applied)
    applied.clear()

    reset_checkpoint(Store(connection), "reader", "earliest", apply=True)
    reader.drain()

    assert sorted(r.id for r in applied) == sorted(r.id for r in first)


def test_one_shard_can_be_reset_to_an_offset(connection: Connection, reader: LogWorker, applied: list[Record]) -> None:
    applied.clear()

    [move] = reset_checkpoint(Store(connection), "reader", Offset(3), shard=1, apply=True)
    [forward] = reset_checkpoint(Store(connection), "reader", "latest", shard=1)
    reader.drain()

    assert (move.before, move.after, move.removed, move.again, move.passed_over) == (11, 3, 0, 8, 0)
    assert (forward.before, forward.after, forward.again, forward.passed_over) == (3, 11, 0, 8)
    assert {r.shard for r in applied} == {1}
    assert next(r.offset for r in applied) == 4


def test_a_name_or_an_offset_that_does_not_fit_is_refused(connection: Connection, reader: LogWorker) -> None:
    wrong: list[tuple[str, Any, int | None, type[Exception], str]] = [
        ("raeder", "latest", None, Unknown, "there are: reader"),
        ("reader", parse_place("other/0 offset 1"), None, Unknown, "reads things, not other"),
        ("reader", "latest", 9, Unknown, "no checkpoint in shard 9; it has shards 0 to 1$"),
        ("reader", Offset(3), None, Refused, "--shard"),  # for several shards
        ("reader", Offset(1000), 0, Refused, "a checkpoint can be at"),
    ]
    for consumer, to, shard, error, text in wrong:
        with pytest.raises(error, match=text):
            reset_checkpoint(Store(connection), consumer, to, shard=shard, apply=True)


def test_a_halted_shard_resumes_behind_the_failing_record(
    connection: Connection, reader: LogWorker, publish: Publish, things: Log, applied: list[Record]
) -> None:
    """Here the failing record is skipped; after a fix of the handler it need not be."""
    stage_rows(connection, things, 1, "bad")
    publish(10, "good")
    reader.drain()
    halted = connection.execute('SELECT shard, "offset" FROM penstock.checkpoints WHERE halted IS NOT NULL').fetchall()
    [(shard, offset)] = halted
    reader.close()
    connection.execute("UPDATE penstock.checkpoints SET dead_in_a_row = 4 WHERE shard = %s", [shard])

    reset_checkpoint(Store(connection), "reader", Offset(offset + 1), shard=shard, resume=True, apply=True)
    in_a_row = connection.execute("SELECT max(dead_in_a_row) FROM penstock.checkpoints").fetchone()
    assert in_a_row == (0,), "the circuit breaker counts anew"
    reader.drain()

    assert sum(record.key.startswith("good") for record in applied) == 10
    assert reset_checkpoint(Store(connection), "reader", resume=True) == ()


LETTERS = """
INSERT INTO penstock.dead_letters
SELECT 'reader', %s, 0, n, n, 'k', 'a', 'o', '{}', NULL, now(), 'r', 1 FROM generate_series(1, 4) AS n
"""
LEFT = 'SELECT "offset" FROM penstock.dead_letters ORDER BY 1'


def test_dead_letters_that_will_be_read_again_are_removed(connection: Connection, reader: LogWorker) -> None:
    """Otherwise they would collide when they are dead-lettered again."""
    connection.execute(LETTERS, ["things"])

    moves = reset_checkpoint(Store(connection), "reader", Offset(2), shard=0, apply=True)

    assert [move.dead_letters for move in moves] == [2]
    assert connection.execute(LEFT).fetchall() == [(1,), (2,)]


@pytest.mark.parametrize(("kind", "left"), [(Log, 2), (Ick, 4), (Queue, 4)])
def test_dead_letters_whose_number_is_no_offset_stay(connection: Connection, kind: type[Channel], left: int) -> None:
    """Guarantee 21: nobody delivers members and jobs again."""
    register_channel(Store(connection), kind("others", shards=1))
    connection.execute(
        'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, halted) '
        "VALUES ('reader', 'others', 0, 2, 1, 'for a test')"
    )
    connection.execute(LETTERS, ["others"])

    [move] = reset_checkpoint(Store(connection), "reader", resume=True, apply=True)

    assert (move.dead_letters, len(connection.execute(LEFT).fetchall())) == (4 - left, left)


def stage_at(connection: Connection, shard: int, *ages: str) -> list[int]:
    """Stages a record for each age in a shard, by a clock that goes as it likes; returns their ids."""
    return [
        found[0]
        for age in ages
        for found in connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, created_at) "
            "VALUES ('things', %s, %s, 'insert', 'thing', '{}', now() - %s::interval) RETURNING id",
            [shard, age, age],
        )
    ]


def set_journal_times(connection: Connection) -> None:
    """Rows of the journal as if each tick had followed the newest of its records, or of those before, at once."""
    connection.execute(
        "UPDATE penstock.journal j SET created_at = (SELECT max(r.created_at) FROM penstock.journal e "
        "CROSS JOIN unnest(e.record_ids) AS n (id) JOIN penstock.staged_records r ON r.id = n.id "
        "WHERE (e.channel, e.shard) = (j.channel, j.shard) AND e.first_offset <= j.first_offset)"
    )


def test_a_time_moves_each_shard_before_its_first_record_since_then(
    connection: Connection, reader: LogWorker, streamer: Streamer, applied: list[Record]
) -> None:
    """Also before older ones that come after it: their transactions committed late."""
    stage_at(connection, 0, "4h", "3h")
    streamer.drain()
    since = stage_at(connection, 0, "1h", "3h", "10min")
    since += stage_at(connection, 1, "50min")
    streamer.drain()
    reader.drain()
    connection.execute(
        "UPDATE penstock.staged_records SET created_at = now() - interval '5h' WHERE created_at > now() - interval '2min'"
    )
    set_journal_times(connection)
    reader.close()
    applied.clear()

    moves = reset_checkpoint(Store(connection), "reader", timedelta(hours=2), apply=True)
    reader.drain()

    assert sum(move.again for move in moves) == 4
    assert sorted(r.id for r in applied) == since
    at = datetime.now(UTC) - timedelta(minutes=55)
    assert [m.again for m in reset_checkpoint(Store(connection), "reader", at)] == [1, 1]


def test_a_time_finds_records_that_were_staged_before_the_clock_was_set_back(
    connection: Connection, reader: LogWorker, streamer: Streamer
) -> None:
    stage_at(connection, 0, "1h", "30min")
    streamer.drain()
    connection.execute(
        "UPDATE penstock.staged_records SET created_at = '2001-01-01' WHERE created_at > now() - interval '20min'"
    )
    newest = "last_offset = (SELECT max(last_offset) FROM penstock.journal WHERE shard = 0)"
    connection.execute("UPDATE penstock.journal SET created_at = '2001-01-01'")
    [(last,)] = connection.execute(
        "UPDATE penstock.journal SET created_at = now() - interval '65min' "
        f"WHERE shard = 0 AND {newest} RETURNING last_offset".encode()
    ).fetchall()

    moves = reset_checkpoint(Store(connection), "reader", timedelta(minutes=61))

    assert moves[0].after == last - 2


def test_a_time_after_the_newest_record_is_the_end_and_one_before_the_oldest_the_beginning(
    connection: Connection, reader: LogWorker
) -> None:
    assert sum(m.again for m in reset_checkpoint(Store(connection), "reader", timedelta(0))) == 0
    moves = reset_checkpoint(Store(connection), "reader", timedelta(days=1))
    assert (sum(m.again for m in moves), [m.removed for m in moves]) == (20, [0, 0])


def test_records_of_that_time_that_retention_has_removed_are_counted(
    connection: Connection, reader: LogWorker, streamer: Streamer
) -> None:
    stage_at(connection, 0, "1h")
    streamer.drain()
    reader.drain()
    [(gone,)] = connection.execute(
        "SELECT last_offset FROM penstock.journal WHERE shard = 0 ORDER BY 1 LIMIT 1"
    ).fetchall()
    connection.execute("DELETE FROM penstock.journal WHERE shard = 0 AND last_offset = %s", [gone])

    moves = reset_checkpoint(Store(connection), "reader", timedelta(hours=2))

    assert [(m.shard, m.after, m.removed) for m in moves if m.removed] == [(0, gone, gone)]


def test_a_time_is_not_before_what_retention_leaves_while_it_is_looked_for(
    connection: Connection, reader: LogWorker, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(20, "later")

    def remove_then(*arguments: Any) -> Any:
        found = offsets_since(*arguments)
        connection.execute("DELETE FROM penstock.journal WHERE first_offset = 1")
        return found

    monkeypatch.setattr(checkpoint, "offsets_since", remove_then)
    moves = reset_checkpoint(Store(connection), "reader", timedelta(days=1))

    ends = "SELECT min(first_offset) - 1 FROM penstock.journal GROUP BY shard ORDER BY shard"
    removed = [(end, end) for (end,) in connection.execute(ends)]
    assert [(move.after, move.removed) for move in moves] == removed
    assert len(removed) == 2
