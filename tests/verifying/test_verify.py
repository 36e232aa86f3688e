"""Verify finds and names every kind of seeded fault, and finds nothing in a sound system."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import redis

from fixtures.constants import SetConstants
from fixtures.flow import stage_rows
from fixtures.verifying import Verify, only
from penstock import Log, Pipeline
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.store import Store
from penstock.errors import InvalidSetting
from penstock.records import Offset, Record, Shard, ShardName
from penstock.streaming import Streamer, tick
from penstock.verifying.comparing import FindingKind, VerificationRange
from penstock.verifying.verification import OFFSETS_A_READ, InlineExaminer, offsets_a_read

Entries = list[tuple[bytes, dict[Any, Any]]]
STREAM = "penstock:{things/0}:log"


@pytest.fixture
def things(request: pytest.FixtureRequest) -> Log:
    """A channel that keeps records for an hour, or as long as the test's parameter."""
    keep = getattr(request, "param", timedelta(hours=1))
    return Log("things", shards=2, keep=keep, entries="plain")


@pytest.fixture
def consumed(flow: Pipeline, things: Log, connection: Connection, database_url: str, redis_url: str) -> Connection:
    """Two hundred records of twenty keys in ten ticks, published; a consumer has applied the first hundred."""

    @flow.consumer(reads=things)
    def reader(session: object, records: Sequence[Record]) -> None: ...

    streaming = Streamer(flow, database_url, redis_url)
    worker = LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), database_url, redis_url))
    for number in range(10):
        stage_rows(connection, things, 20)
        streaming.drain()
        if number == 4:
            worker.drain()
    streaming.close()
    worker.close()
    return connection


def rewrite(client: redis.Redis, change: Callable[[Entries], Entries]) -> None:
    """Rewrites the entries in the stream of shard 0."""
    entries: Any = client.xrange(STREAM)
    client.delete(STREAM)
    for entry_id, fields in change(entries):
        client.xadd(STREAM, fields, id=entry_id)


def number_at(connection: Connection, offset: int, shard: int = 0) -> int:
    """Returns the id of the record at an offset of the journal."""
    [(record,)] = connection.execute(
        "SELECT record_ids[%(offset)s - first_offset + 1] FROM penstock.journal "
        "WHERE shard = %(shard)s AND %(offset)s BETWEEN first_offset AND last_offset",
        {"offset": offset, "shard": shard},
    ).fetchall()
    return int(record)


def journal_end(connection: Connection) -> int:
    """Returns the last offset of shard 0."""
    [(end,)] = connection.execute("SELECT max(last_offset) FROM penstock.journal WHERE shard = 0").fetchall()
    return int(end)


def test_a_sound_system_has_no_findings(consumed: Connection, verified: Verify) -> None:
    done = verified()

    assert (done.clean, done.records, done.shards, 0 < done.seconds < 3600) == (True, 200, 2, True)
    assert (done.findings, done.unpublished, done.overtaken) == ([], 0, 0)


def test_the_size_of_reads_does_not_affect_the_result(
    consumed: Connection, verified: Verify, set_constants: SetConstants
) -> None:
    set_constants("verifying.verification", OFFSETS_A_READ=7)
    done = verified()

    assert (done.clean, done.records) == (True, 200)


def test_a_batch_may_be_read_in_parts(
    connection: Connection, verified: Verify, database_url: str, redis_url: str, set_constants: SetConstants
) -> None:
    """It is in the log by the offset of its last record, which may be beyond what is read."""
    packed = Log("packed", shards=1)
    stage_rows(connection, packed, 50)
    with Streamer(Pipeline([packed]), database_url, redis_url) as streaming:
        streaming.drain()
    set_constants("verifying.verification", OFFSETS_A_READ=7)
    done = verified()

    assert (done.findings, done.records) == ([], 50)


@pytest.mark.parametrize(("data", "headers"), [("large", "NULL"), ("'{}'", "large")])
def test_large_records_are_read_a_few_at_a_time(
    connection: Connection, streamer: Streamer, data: str, headers: str
) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers) "
        f"SELECT 'things', 0, 'k', 'a', 'o', {data}, {headers} FROM ("
        "SELECT jsonb_build_object('h', string_agg(md5(n::text), '')) AS large FROM generate_series(1, 32768) n) one".encode()
    )
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) VALUES ('things', 1, 'k', 'a', 'o', '{}')"
    )
    streamer.drain()

    def offsets(shard: int) -> int:
        wanted = VerificationRange(ShardName("things", Shard(shard)), 0, 1, 1)
        return offsets_a_read(Store(connection), wanted)

    assert offsets(0) == 15
    assert offsets(1) == OFFSETS_A_READ


def test_deleted_entries_are_missing(consumed: Connection, verified: Verify, redis_client: redis.Redis) -> None:
    for first, last in ((41, 43), (1, journal_end(consumed))):
        redis_client.xdel(STREAM, *(f"{offset}-0" for offset in range(first, last + 1)))
        found = only(verified())
        assert (found.kind, found.where, found.offset, found.count) == (
            FindingKind.MISSING,
            "log",
            first,
            last - first + 1,
        )


@pytest.mark.parametrize(
    ("field", "name"), [(b"data", "data"), (b"key", "key"), (b"headers", "headers"), (b"ts", "time of staging")]
)
def test_a_changed_entry_is_named_with_its_field(
    consumed: Connection, verified: Verify, redis_client: redis.Redis, field: bytes, name: str
) -> None:
    rewrite(
        redis_client,
        lambda entries: [(n, fields | {field: b"7\xff"} if n == b"50-0" else fields) for n, fields in entries],
    )
    found = only(verified())

    assert (found.kind, found.where, found.offset) == (FindingKind.CHANGED, "log", 50)
    assert found.record == number_at(consumed, 50)
    assert found.text.startswith(name)


def test_an_entry_repeated_beyond_the_end_is_named_with_its_position(
    consumed: Connection, verified: Verify, redis_client: redis.Redis
) -> None:
    entries: Any = redis_client.xrange(STREAM)
    _, fields = entries[59]
    redis_client.xadd(STREAM, fields, id=f"{len(entries) + 1}-0")
    found = only(verified())

    assert (found.kind, found.offset) == (FindingKind.DOUBLED, len(entries) + 1)
    assert found.record == number_at(consumed, 60)
    assert "belongs to things/0 offset 60 and is there too" in found.text


@pytest.mark.parametrize("entry_id", [b"60-1", b"61-0"])
def test_an_entry_repeated_in_the_middle_is_named_with_its_position(
    consumed: Connection, verified: Verify, redis_client: redis.Redis, entry_id: bytes
) -> None:
    def doubled(entries: Entries) -> Entries:
        _, fields = entries[59]
        others = [each for each in entries if each[0] != entry_id]
        return sorted([*others, (entry_id, fields)], key=lambda each: [int(n) for n in each[0].split(b"-")])

    rewrite(redis_client, doubled)
    found = only(verified())

    assert (found.kind, found.record) == (FindingKind.DOUBLED, number_at(consumed, 60))
    assert f"entry {entry_id.decode()}" in found.text
    assert "belongs to things/0 offset 60 and is there too" in found.text


def test_entries_of_a_key_that_were_swapped_are_inverted(
    consumed: Connection, verified: Verify, redis_client: redis.Redis
) -> None:
    def swapped(entries: Entries) -> Entries:
        places = [n for n, (_, f) in enumerate(entries) if f[b"key"] == entries[30][1][b"key"]]
        a, b = places[2], places[3]
        out = list(entries)
        out[a], out[b] = (entries[a][0], entries[b][1]), (entries[b][0], entries[a][1])
        return out

    rewrite(redis_client, swapped)
    done = verified()

    assert done.counts == {FindingKind.INVERTED: 2}
    first, second = done.findings
    assert f"belongs to things/0 offset {second.offset};" in first.text
    assert f"belongs to things/0 offset {first.offset};" in second.text


def test_a_repeated_entry_is_recognized_when_its_position_is_before_the_start(
    consumed: Connection, verified: Verify, redis_client: redis.Redis
) -> None:
    entries: Any = redis_client.xrange(STREAM)
    redis_client.xadd(STREAM, entries[2][1], id=f"{len(entries) + 1}-0")
    found = only(verified(start=Offset(50)))

    assert found.kind == FindingKind.DOUBLED
    assert "belongs to things/0 offset 3 and is there too" in found.text


@pytest.mark.parametrize("there", [True, False])
def test_a_log_that_goes_one_record_beyond_the_journal_is_named(
    consumed: Connection, verified: Verify, redis_client: redis.Redis, *, there: bool
) -> None:
    """Postgres has lost a commit that was published, whether or not the log still has its entry."""
    end = journal_end(consumed)
    redis_client.xadd(STREAM, {"id": "999"}, f"{end + 1}-0")
    if not there:
        redis_client.xdel(STREAM, f"{end + 1}-0")
    done = verified()
    found = only(done)

    assert done.unpublished == 0
    where = (found.kind, found.where, found.offset, found.count)
    assert where == (FindingKind.SURPLUS, "log", end + 1, 1)
    assert there or f"has given offsets up to {end + 1}, the journal ends at {end}" in found.text


def test_a_foreign_entry_is_surplus(consumed: Connection, verified: Verify, redis_client: redis.Redis) -> None:
    redis_client.xadd(STREAM, {"hello": "world"})
    found = only(verified())

    assert (found.kind, found.record) == (FindingKind.SURPLUS, None)
    assert "holds no record, which the journal does not know" in found.text


def test_a_log_that_cannot_be_read_is_named_and_does_not_hide_the_others(
    consumed: Connection, verified: Verify, redis_client: redis.Redis
) -> None:
    """A consumer's checkpoint in it is compared with nothing."""
    redis_client.delete(STREAM)
    redis_client.set(STREAM, "somebody's")
    redis_client.xdel(STREAM.replace("0", "1"), "7-0")

    found = [(each.kind, each.shard, each.offset, each.count) for each in verified().findings]
    assert found == [(FindingKind.SURPLUS, 0, 0, 1), (FindingKind.MISSING, 1, 7, 1)]


def test_a_changed_staged_row_is_named(consumed: Connection, verified: Verify) -> None:
    record = number_at(consumed, 12)
    consumed.execute(
        "UPDATE penstock.staged_records SET data = '{\"number\": 0}', action = 'x' WHERE id = %s", (record,)
    )
    found = only(verified())

    assert (found.kind, found.offset, found.record) == (FindingKind.CHANGED, 12, record)
    assert found.text.startswith("action and data of record")


def test_a_hole_in_the_journal_is_named_with_the_records_it_left(
    consumed: Connection, verified: Verify, redis_client: redis.Redis
) -> None:
    """It hides no entry after it."""
    changed = b"%d-0" % journal_end(consumed)
    rewrite(
        redis_client,
        lambda entries: [(n, fields | {b"data": b"7"} if n == changed else fields) for n, fields in entries],
    )
    [(first, last, records)] = consumed.execute(
        "DELETE FROM penstock.journal WHERE shard = 0 AND 50 BETWEEN first_offset AND last_offset "
        "RETURNING first_offset, last_offset, record_ids"
    ).fetchall()
    done = verified()

    assert done.counts == {
        FindingKind.MISSING: len(records),
        FindingKind.CHANGED: 1,
        FindingKind.OVERLOOKED: len(records),
    }
    overlooked, hole, _ = done.findings
    assert (hole.where, hole.offset, hole.count) == ("journal", first, last - first + 1)
    assert (overlooked.where, overlooked.record) == ("staged", min(records))


def test_a_record_twice_in_the_journal_is_doubled(consumed: Connection, verified: Verify) -> None:
    consumed.execute(
        "UPDATE penstock.journal SET record_ids[1] = (SELECT record_ids[1] FROM penstock.journal WHERE shard = 0 AND first_offset = 1) "
        "WHERE shard = 0 AND 90 BETWEEN first_offset AND last_offset"
    )
    done = verified()

    assert done.counts[FindingKind.DOUBLED] == 1
    doubled = next(each for each in done.findings if each.kind is FindingKind.DOUBLED)
    assert (doubled.where, doubled.record) == ("journal", number_at(consumed, 1))


def test_a_record_in_two_shards_is_doubled(consumed: Connection, verified: Verify) -> None:
    consumed.execute(
        "UPDATE penstock.journal SET record_ids[1] = (SELECT record_ids[1] FROM penstock.journal WHERE shard = 0 AND first_offset = 1) "
        "WHERE shard = 1 AND first_offset = 1"
    )
    done = verified()

    [doubled] = [each for each in done.findings if each.kind is FindingKind.DOUBLED]
    assert (doubled.shard, doubled.offset, doubled.record) == (1, 1, number_at(consumed, 1))
    assert "at things/0 offset 1 too" in doubled.text


def test_an_order_that_no_tick_produces_is_inverted(consumed: Connection, verified: Verify) -> None:
    consumed.execute(
        "UPDATE penstock.journal SET record_ids[1] = record_ids[2], record_ids[2] = record_ids[1] WHERE shard = 0 AND first_offset = 1"
    )
    done = verified()

    assert {(f.where, f.offset) for f in done.findings if f.kind is FindingKind.INVERTED} == {
        ("journal", 2),
        ("log", 1),
        ("log", 2),
    }


def test_a_committed_record_without_an_offset_is_overlooked(consumed: Connection, verified: Verify) -> None:
    consumed.execute(
        "INSERT INTO penstock.staged_records (xid, channel, shard, key, action, object, data) "
        "VALUES ('3', 'things', 0, 'k', 'a', 'o', '{}')"
    )
    found = only(verified())

    assert (found.kind, found.where) == (FindingKind.OVERLOOKED, "staged")


def test_a_checkpoint_ahead_of_the_journal_or_of_the_log_is_named(
    consumed: Connection, verified: Verify, redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    set_constants("verifying.bounds", CATCH_UP_TIMEOUT_S=0.2)
    end = journal_end(consumed)
    [(before,)] = consumed.execute('SELECT "offset" FROM penstock.checkpoints WHERE shard = 0').fetchall()
    consumed.execute('UPDATE penstock.checkpoints SET "offset" = %s WHERE shard = 0', (end + 1,))
    ahead = only(verified())
    consumed.execute('UPDATE penstock.checkpoints SET "offset" = %s WHERE shard = 0', (before,))
    redis_client.delete(STREAM)
    lost = only(verified())

    assert (ahead.kind, ahead.where, ahead.count) == (FindingKind.AHEAD, "consumer reader", 1)
    assert f"the journal ends at {end}" in ahead.text
    assert (lost.kind, lost.offset, lost.count) == (FindingKind.AHEAD, 1, before)
    assert "Redis has lost records" in lost.text


def test_records_removed_before_a_consumer_passed_them_are_missing(
    consumed: Connection, verified: Verify, redis_url: str
) -> None:
    """Others are not, though they were removed while the range was compared."""
    consumed.execute("DELETE FROM penstock.staged_records r USING penstock.journal j WHERE j.shard = 0 AND j.last_offset < 40 AND r.id = ANY (j.record_ids)")  # fmt: skip
    consumed.execute("DELETE FROM penstock.journal WHERE shard = 0 AND last_offset < 40")
    [(begins,)] = consumed.execute("SELECT min(first_offset) FROM penstock.journal WHERE shard = 0").fetchall()

    for checkpoint, lost in ((5, begins - 6), (begins - 2, 1), (begins - 1, 0)):
        consumed.execute('UPDATE penstock.checkpoints SET "offset" = %s WHERE shard = 0', [checkpoint])
        found = [(each.kind, each.where, each.offset, each.count) for each in verified().findings]
        expected = (FindingKind.MISSING, "consumer reader", checkpoint + 1, lost)
        assert found == [expected] * bool(lost)

    end = journal_end(consumed)
    consumed.execute(
        "INSERT INTO penstock.journal (channel, shard, first_offset, last_offset, record_ids, epoch) "
        "VALUES ('others', 0, 1, 1, '{1}', 1)"
    )
    span = VerificationRange(ShardName("things", Shard(0)), 0, end, end)
    examined = InlineExaminer(Store(consumed), redis_url).examine([span])
    assert (examined.records, examined.findings) == (end - begins + 1, [])


def test_a_shard_that_a_consumer_or_everybody_leaves_unread_is_named(consumed: Connection, verified: Verify) -> None:
    """It is not behind there: it will never read these records."""
    consumed.execute("DELETE FROM penstock.checkpoints WHERE shard = 0")
    end = journal_end(consumed)
    one = only(verified())
    consumed.execute("UPDATE penstock.channels SET shards = 1")
    consumed.execute("DELETE FROM penstock.checkpoints")
    [everybody] = [each for each in verified().findings if each.where == "consumers"]

    assert (one.kind, one.where) == (FindingKind.MISSING, "consumer reader")
    assert (one.offset, one.count) == (1, end)
    assert (everybody.kind, everybody.shard, everybody.offset) == (FindingKind.MISSING, 1, 1)
    assert everybody.count == 200 - end


def test_unpublished_records_are_not_findings(
    consumed: Connection, verified: Verify, things: Log, flow: Pipeline, database_url: str
) -> None:
    stage_rows(consumed, things, 10)
    tick(Store(consumed))
    stage_rows(consumed, things, 10)
    done = verified()

    assert (done.clean, done.records, done.unpublished) == (True, 210, 10)


def test_transactions_without_a_common_lock_may_overtake_and_are_counted(
    consumed: Connection, verified: Verify, things: Log, flow: Pipeline, database_url: str, redis_url: str
) -> None:
    with connect_postgres(database_url, application="slow") as slow:
        with slow.transaction():
            stage_rows(slow, things, 3)
            stage_rows(consumed, things, 3)
            streaming = Streamer(flow, database_url, redis_url)
            streaming.drain()
        streaming.drain()
        streaming.close()
    done = verified()

    assert (done.clean, done.overtaken) == (True, 3)


def test_a_verification_can_start_at_a_time_that_postgres_can_parse(consumed: Connection, verified: Verify) -> None:
    assert verified(start="yesterday").records == 200
    assert verified(start="tomorrow").records == 0
    with pytest.raises(InvalidSetting, match="takes an offset, or a time"):
        verified(start="soon")
