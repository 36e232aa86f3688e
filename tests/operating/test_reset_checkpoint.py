"""Resetting a checkpoint by hand."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fixtures.flow import stage_rows
from penstock import Log, Pipeline
from penstock.consuming import LogWorker
from penstock.database.connections import Connection
from penstock.errors import Refused, Unknown
from penstock.operating.reset import reset_checkpoint
from penstock.records import Offset, Record
from penstock.streaming import Streamer


@pytest.fixture
def applied() -> list[Record]:
    return []


@pytest.fixture
def reader(
    flow: Pipeline,
    things: Log,
    connection: Connection,
    streamer: Streamer,
    database_url: str,
    redis_url: str,
    applied: list[Record],
) -> Iterator[LogWorker]:
    """A consumer that has applied 20 records."""

    @flow.consumer(reads=things, on_poison="halt", attempts=1)
    def reader(_session: Any, records: Sequence[Record]) -> None:
        if any(record.key.startswith("bad") for record in records):
            raise ValueError(records[0].key)
        applied.extend(records)

    stage_rows(connection, things, 20)
    streamer.drain()
    worker = LogWorker(flow, flow.get_consumer("reader"), database_url, redis_url)
    worker.drain()
    worker.close()
    yield worker
    worker.close()


def test_without_apply_nothing_moves(connection: Connection, reader: LogWorker) -> None:
    before = connection.execute("SELECT * FROM penstock.checkpoints ORDER BY shard").fetchall()

    moves = reset_checkpoint(connection, "reader", "earliest")

    assert sum(move.again for move in moves) == 20
    assert (
        connection.execute("SELECT * FROM penstock.checkpoints ORDER BY shard").fetchall() == before
    )


def test_after_a_reset_to_earliest_everything_is_applied_again(
    connection: Connection, reader: LogWorker, applied: list[Record]
) -> None:
    first = list(applied)
    applied.clear()

    reset_checkpoint(connection, "reader", "earliest", apply=True)
    reader.drain()

    assert sorted(r.id for r in applied) == sorted(r.id for r in first)


def test_one_shard_can_be_reset_to_an_offset(
    connection: Connection, reader: LogWorker, applied: list[Record]
) -> None:
    applied.clear()

    reset_checkpoint(connection, "reader", Offset(3), shard=1, apply=True)
    reader.drain()

    assert {r.shard for r in applied} == {1}
    assert next(r.offset for r in applied) == 4


def test_one_offset_for_several_shards_is_refused(
    connection: Connection, reader: LogWorker
) -> None:
    with pytest.raises(Refused, match="--shard"):
        reset_checkpoint(connection, "reader", Offset(3), apply=True)


def test_an_offset_that_does_not_exist_yet_is_refused(
    connection: Connection, reader: LogWorker
) -> None:
    with pytest.raises(Refused, match="a checkpoint can be at"):
        reset_checkpoint(connection, "reader", Offset(1000), shard=0, apply=True)


def test_a_wrong_name_moves_no_checkpoint(connection: Connection, reader: LogWorker) -> None:
    with pytest.raises(Unknown, match="there are: reader"):
        reset_checkpoint(connection, "raeder", "latest", apply=True)


def test_a_halted_shard_resumes_behind_the_failing_record(
    connection: Connection,
    reader: LogWorker,
    streamer: Streamer,
    things: Log,
    applied: list[Record],
) -> None:
    """Here the failing record is skipped; after a fix of the handler it need not be."""
    stage_rows(connection, things, 1, "bad")
    stage_rows(connection, things, 10, "good")
    streamer.drain()
    reader.drain()
    halted = connection.execute(
        'SELECT shard, "offset" FROM penstock.checkpoints WHERE halted IS NOT NULL'
    ).fetchall()
    [(shard, offset)] = halted
    reader.close()

    reset_checkpoint(connection, "reader", Offset(offset + 1), shard=shard, resume=True, apply=True)
    reader.drain()

    assert sum(record.key.startswith("good") for record in applied) == 10
    assert reset_checkpoint(connection, "reader", resume=True) == ()


def test_dead_letters_that_will_be_read_again_are_removed(
    connection: Connection, reader: LogWorker
) -> None:
    """Otherwise they would collide when they are dead-lettered again."""
    connection.execute(
        "INSERT INTO penstock.dead_letters SELECT 'reader', 'things', 0, n, n, 'k', 'a', 'o', '{}', NULL, now(), 'r', 1 "
        "FROM generate_series(1, 4) AS n"
    )

    moves = reset_checkpoint(connection, "reader", Offset(2), shard=0, apply=True)

    assert [move.dead_letters for move in moves] == [2]
    assert connection.execute(
        'SELECT "offset" FROM penstock.dead_letters ORDER BY 1'
    ).fetchall() == [
        (1,),
        (2,),
    ]
