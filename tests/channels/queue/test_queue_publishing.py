"""A pipeline's batch and a queue's position: what is written, what is known, and what is another history.

The position is that of a batch of five records, the last of which is number 105.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis

from penstock.channels.batch_outcomes import Appended, Behind, FencedOff, Foreign, Reply, parse_reply
from penstock.channels.queue import publishing
from penstock.channels.queue.publishing import QueueBatch, QueuedRecord, QueueWriter
from penstock.channels.queue.shard import ITEMS
from penstock.clients import FairQueue
from penstock.records import Epoch, Offset, RecordId, Shard, ShardName

SHARD = ShardName("jobs", Shard(0))
STAGED_US = 1_790_000_000_000_000
POSITION, EPOCH = "penstock:{jobs/0}:log", "penstock:{jobs/0}:epoch"


@pytest.fixture
def writer(redis_client: redis.Redis) -> QueueWriter:
    return QueueWriter(redis_client, "penstock", SHARD, 4, 2)


def make_record(offset: int, **fields: object) -> QueuedRecord:
    record = QueuedRecord(
        RecordId(100 + offset), Offset(offset), "t", "", None, None, ("", "", ""), "1", "{}", STAGED_US + offset
    )
    return replace(record, **fields)  # type: ignore[arg-type]


def make_batch(
    first: int, last: int, *, epoch: int = 3, begins: bool = False, done: Sequence[int] = (), **fields: object
) -> QueueBatch:
    """Records whose ids are a hundred more than their offsets; those that are done have no message."""
    offsets = range(first, last + 1)
    places = [(RecordId(100 + offset), 0 if offset in done else STAGED_US + offset) for offset in offsets]
    messages = [make_record(offset) for offset in offsets if offset not in done]
    batch = QueueBatch(SHARD, Epoch(epoch), Offset(first), Offset(last), begins, places, messages)
    return replace(batch, **fields)  # type: ignore[arg-type]


def at(offset: int, us: int = 0, id_: int = 0) -> Sequence[tuple[RecordId, int]]:
    """The place of the only record of a batch: with another time, or another id."""
    return [(RecordId(id_ or 100 + offset), us)]


BEHIND = Behind(Offset(5))
KNOWN = Appended(Offset(5), 0)
BATCHES: dict[str, tuple[QueueBatch, Reply, int]] = {
    "the next one": (make_batch(6, 8), Appended(Offset(8), 3), 8),
    "the next one, of which all are done": (make_batch(6, 8, done=(6, 7, 8)), Appended(Offset(8), 3), 5),
    "one that overlaps": (make_batch(5, 8), BEHIND, 5),
    "one after a gap": (make_batch(7, 8), BEHIND, 5),
    "one after what the journal has no more": (make_batch(7, 8, begins=True), Appended(Offset(8), 2), 7),
    "the next one, with which the journal begins": (make_batch(6, 8, begins=True), Appended(Offset(8), 3), 8),
    "one that overlaps, with which the journal begins": (make_batch(5, 8, begins=True), BEHIND, 5),
    "the same": (make_batch(1, 5), KNOWN, 5),
    "the last one again": (make_batch(5, 5), KNOWN, 5),
    "the last one, which is done": (make_batch(5, 5, places=at(5)), KNOWN, 5),
    "the last one with another time": (make_batch(5, 5, places=at(5, STAGED_US)), Foreign(Offset(5), "105"), 5),
    "another one in its place": (make_batch(5, 5, places=at(5, STAGED_US + 5, 77)), Foreign(Offset(5), "105"), 5),
    "another one that is done": (make_batch(5, 5, places=at(5, 0, 77)), Foreign(Offset(5), "105"), 5),
    "an earlier one": (make_batch(2, 4), KNOWN, 5),
    "one of an older epoch": (make_batch(6, 8, epoch=2), FencedOff(Epoch(3)), 5),
    "one of a newer epoch": (make_batch(6, 8, epoch=4), Appended(Offset(8), 3), 8),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_written_behind_the_position_or_is_known_or_of_another_history(
    name: str, writer: QueueWriter, redis_client: redis.Redis
) -> None:
    """Guarantee 8: a restored Postgres gives ids out again.  The time of a record that is done is not known."""
    queue = FairQueue(redis_client, "jobs", streams=4)
    first = writer.write(make_batch(1, 5, begins=True))
    assert (first.reply, first.is_new, len(queue)) == (Appended(Offset(5), 5), True, 5)
    batch, reply, length = BATCHES[name]
    found = writer.write(batch)

    assert (found.reply, found.is_new, len(queue)) == (reply, False, length)
    assert [result.word for result in found.results] == ["written"] * (length - 5)
    epoch = max(3, batch.epoch) if reply != FencedOff(Epoch(3)) else 3
    assert redis_client.get(EPOCH) == str(epoch).encode()
    again = writer.write(make_batch(1, 5, epoch=9, begins=True))
    assert again.reply == Appended(reply.tail if isinstance(reply, Appended) else Offset(5), 0)


def test_the_last_record_of_a_batch_is_done_and_its_time_is_not_compared_later(writer: QueueWriter) -> None:
    writer.write(make_batch(1, 5, begins=True, done=(5,)))

    for us in (0, STAGED_US, STAGED_US + 5):
        assert writer.write(make_batch(5, 5, places=at(5, us))).reply == KNOWN
    assert writer.write(make_batch(5, 5, places=at(5, 0, 77))).reply == Foreign(Offset(5), "105")


@pytest.mark.parametrize("count", [ITEMS - 1, ITEMS, ITEMS + 1, 2 * ITEMS + 1])
def test_a_batch_of_several_calls_goes_on_where_the_last_one_has_ended(
    count: int, writer: QueueWriter, redis_client: redis.Redis
) -> None:
    written = writer.write(make_batch(1, count, begins=True))
    more = writer.write(make_batch(count + 1, 2 * count, done=range(count + 2, 2 * count + 1, 2)))

    assert (written.is_new, more.is_new) == (True, False)
    assert written.reply == Appended(Offset(count), count)
    assert more.reply == Appended(Offset(2 * count), count)
    assert len(FairQueue(redis_client, "jobs", streams=4)) == count + (count + 1) // 2
    assert [each.record.offset for each in written.results] == list(range(1, count + 1))


def test_a_position_that_is_lost_between_the_calls_of_a_batch_is_noticed(
    writer: QueueWriter, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal begins with the first call alone."""

    def lose(answer: Any, doing: str) -> Reply:
        redis_client.delete(POSITION)
        return parse_reply(answer, doing)

    monkeypatch.setattr(publishing, "parse_reply", lose)

    assert writer.write(make_batch(1, ITEMS + 1, begins=True)).reply == Behind(Offset(0))


def test_what_is_written_apart_moves_no_position_and_is_known_again(writer: QueueWriter) -> None:
    writer.write(make_batch(1, 5, begins=True))
    apart = QueueBatch(
        SHARD, Epoch(3), Offset(0), Offset(0), False, (), [make_record(0, id=RecordId(n)) for n in (9, 105)]
    )
    found = [writer.write(apart) for _ in range(2)]

    assert [[result.word for result in each.results] for each in found] == [["written", "known"], ["known", "known"]]
    assert writer.write(make_batch(6, 6)).reply == Appended(Offset(6), 1)


def test_an_id_that_a_message_of_another_tenant_has_is_taken(writer: QueueWriter, redis_client: redis.Redis) -> None:
    """It is another history's record; and the message stays what it was."""
    queue = FairQueue(redis_client, "jobs", streams=4)
    writer.write(make_batch(1, 5, begins=True))
    records = [make_record(0, id=RecordId(105), tenant=tenant) for tenant in ("t", "other")]
    found = writer.write(QueueBatch(SHARD, Epoch(3), Offset(0), Offset(0), False, (), records))

    assert [result.word for result in found.results] == ["known", "taken"]
    with queue.reader() as reader:
        assert {lease.message.tenant for lease in reader.read(10)} == {"t"}


def test_what_a_queue_refuses_is_said_of_each_message(writer: QueueWriter, redis_client: redis.Redis) -> None:
    """By name, by window, and for want of room."""
    until, window = ("n", "running", ""), ("w", "window", "5000")
    names = [make_record(1, unique=until), make_record(2, unique=window)]
    writer.write(make_batch(1, 2, begins=True, messages=names))
    again = [replace(record, id=RecordId(record.id + 50)) for record in names]
    found = writer.write(make_batch(3, 4, messages=again))

    assert [(each.word, each.holder, each.in_window) for each in found.results] == [
        ("duplicate", "101", False),
        ("duplicate", "102", True),
    ]
    assert not writer.has_released(RecordId(101))
    assert not writer.has_released(RecordId(999))
    with FairQueue(redis_client, "jobs", streams=4).reader() as reader:
        reader.done(reader.read(2))
    assert writer.has_released(RecordId(101))


def test_what_is_missing_is_known_from_the_messages_of_records(writer: QueueWriter, redis_client: redis.Redis) -> None:
    writer.write(make_batch(1, 5, begins=True))
    ids = [RecordId(id_) for id_ in (77, 101, 105, 106)]
    assert writer.find_missing(ids) == [77, 106]

    redis_client.delete("penstock:{jobs/0}:q-meta")  # it rebuilds what it has first
    assert writer.find_missing(ids) == [77, 106]
    writer.delete([RecordId(101)])
    assert writer.find_missing(ids) == [77, 101, 106]


@pytest.mark.parametrize("damage", ["appended to as a log", "without its queue", "with another end"])
def test_a_position_that_stands_for_nothing_is_forgotten_and_the_publisher_starts_over(
    damage: str, writer: QueueWriter, redis_client: redis.Redis
) -> None:
    writer.write(make_batch(1, 5, begins=True))
    if damage == "without its queue":
        redis_client.delete("penstock:{jobs/0}:q-meta")
    else:
        entry = dict.fromkeys(["id", "key", "action", "object", "data", "headers", "ts", "written"], "1")
        if damage == "with another end":
            redis_client.delete(POSITION)
            entry["other"] = entry.pop("written")
        redis_client.xadd(POSITION, entry, id="6-0")  # type: ignore[arg-type]
    assert writer.find_missing([]) == []
    assert not redis_client.exists(POSITION)

    found = writer.write(make_batch(1, 5, begins=True))
    assert (found.reply, found.is_new) == (Appended(Offset(5), 5), True)
    assert {result.word for result in found.results} == {"known"}
