"""The publisher keeps the log equal to the journal, whatever happens to Redis or to a reply."""

import math
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.flow import Publish, ReadLog, Site, entry_of_a_record, stage_rows
from fixtures.intervals import refresh_now
from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.errors import AppendRefused, DamagedJournal, Fenced, ForeignLog, HistoryDiverged
from penstock.journal.journal_reader import journal_tails
from penstock.records import Epoch, Offset, Record, ShardName
from penstock.streaming import Streamer, tick
from penstock.streaming.unpublished import BATCH_BYTES, unpublished


def ids(log: dict[ShardName, list[Record]]) -> list[int]:
    return sorted(record.id for records in log.values() for record in records)


def dense(log: dict[ShardName, list[Record]]) -> bool:
    return all([r.offset for r in records] == list(range(1, len(records) + 1)) for records in log.values())


def test_staged_records_are_in_the_log_in_order_and_without_gaps(
    streamer: Streamer, connection: Connection, things: Log, logged: ReadLog
) -> None:
    stage_rows(connection, things, 2500)

    assert streamer.drain() == 2500
    log = logged(things)
    assert ids(log) == list(range(1, 2501))
    assert dense(log)
    assert all(sorted(r.id for r in records) == [r.id for r in records] for records in log.values())


def test_payloads_arrive_unchanged(streamer: Streamer, connection: Connection, things: Log, logged: ReadLog) -> None:
    data = '{"text": "ü\\n\\"quoted\\"", "n": 12345678901234567890.125, "list": [1, null, true]}'
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers) "
        "VALUES ('things', 1, 'ключ', 'update', 'thing', %s, %s)",
        (data, '{"trace": "1-2"}'),
    )
    streamer.drain()

    (record,) = logged(things)[things.shard_names[1]]
    assert (record.key, record.action, record.headers) == ("ключ", "update", {"trace": "1-2"})
    assert "12345678901234567890.125" in record.data_json
    assert record.data["text"] == 'ü\n"quoted"'


def test_inline_records_are_not_read_again(
    streamer: Streamer, connection: Connection, things: Log, logged: ReadLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer.drain()
    asked: list[dict[ShardName, Offset]] = []

    def nothing_to_read(_: Store, target: Any, tails: Any, **_options: Any) -> Any:
        asked.append({shard: tails[shard] for shard in target})
        yield from ()

    monkeypatch.setattr("penstock.streaming.publisher.unpublished", nothing_to_read)
    stage_rows(connection, things, 30)

    assert streamer.round().added == 30
    assert ids(logged(things)) == list(range(1, 31))
    assert asked[0] == {shard: len(records) for shard, records in logged(things).items()}


def test_inline_records_wait_for_records_that_redis_has_lost(
    publish: Publish, redis_client: redis.Redis, things: Log, logged: ReadLog
) -> None:
    """Guarantee 4: the log is filled from its beginning, not from the last tick."""
    publish(30)
    redis_client.flushall()
    publish(30)

    assert ids(logged(things)) == list(range(1, 61))
    assert dense(logged(things))


def test_inline_records_wait_for_those_of_an_earlier_tick(
    streamer: Streamer, connection: Connection, things: Log, logged: ReadLog
) -> None:
    """Guarantee 1: as after a crash between a tick and its publishing; the gap is noticed before anything is sent."""
    streamer.open()
    stage_rows(connection, things, 30)
    left = tick(Store(connection))
    stage_rows(connection, things, 30)
    streamer.opened().publisher.tails.advance_target(left.tails)

    with capture_logs() as logs:
        assert streamer.round().added == 60

    assert dense(logged(things))
    assert [each for each in logs if each["event"] == "log was behind"] == []


def test_of_few_heavy_records_those_that_are_not_inline_are_read(
    streamer: Streamer, connection: Connection, things: Log, logged: ReadLog
) -> None:
    connection.execute("ALTER TABLE penstock.staged_records ALTER COLUMN data SET STORAGE EXTERNAL")
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', i %% 2, 'k', 'a', 'o', to_jsonb(repeat('x', %s)) FROM generate_series(1, 12) i",
        [BATCH_BYTES // 3],
    )

    assert streamer.round().added == 12
    assert ids(logged(things)) == list(range(1, 13))
    assert dense(logged(things))


def test_a_lost_reply_does_not_double_a_record(
    streamer: Streamer, publish: Publish, things: Log, logged: ReadLog
) -> None:
    """Guarantee 1: the batch is sent again, and the log does not change."""
    publish(100)
    before = logged(things)

    resent = streamer.opened().publisher.resend(40)

    assert (resent.added, resent.known > 0) == (0, True)
    assert logged(things) == before


def test_two_streamers_make_one_log(site: Site) -> None:
    """Guarantee 3: two at once, one of them out of date, are slow, never wrong."""
    rival = Streamer(site.flow, site.database_url, site.redis_url)
    rival.open()
    for number in range(20):
        stage_rows(site.connection, site.things, 30, f"{number} ")
        (site.streamer if number % 3 else rival).round()
        if number % 2:
            rival.round()
    site.streamer.drain()
    rival.drain()
    rival.close()

    log = site.log()
    assert ids(log) == list(range(1, 601))
    assert dense(log)


def run_on(streamer: Streamer) -> None:
    """Lets a streamer run until it is idle, as it does without reading all logs again: it knows only what scripts reply."""
    while not streamer.round().idle:
        pass


def test_a_flushed_redis_is_filled_again_from_the_journal(
    streamer: Streamer, redis_client: redis.Redis, connection: Connection, things: Log, logged: ReadLog
) -> None:
    """Guarantee 9: Postgres keeps every record until all consumers have passed it."""
    stage_rows(connection, things, 500)
    streamer.drain()
    before = logged(things)

    redis_client.flushall()
    stage_rows(connection, things, 1, "after")
    run_on(streamer)
    assert dense(logged(things))
    refresh_now(streamer)
    streamer.drain()

    after = logged(things)
    assert {s: r[: len(before[s])] for s, r in after.items()} == before
    assert sum(map(len, after.values())) == 501


def test_a_redis_restored_to_an_older_state_is_filled_up(
    streamer: Streamer, redis_client: redis.Redis, connection: Connection, things: Log, logged: ReadLog
) -> None:
    """Guarantee 9: the script's comparison decides, not the publisher's memory."""
    stage_rows(connection, things, 50, "old")
    streamer.drain()
    keys = redis_client.keys("*")
    older = {key: redis_client.dump(key) for key in keys}
    stage_rows(connection, things, 50, "new")
    streamer.drain()
    before = logged(things)
    for key, value in older.items():
        assert value is not None
        redis_client.restore(key, 0, value, replace=True)
    stage_rows(connection, things, 10, "newest")

    run_on(streamer)

    after = logged(things)
    assert {s: r[: len(before[s])] for s, r in after.items()} == before
    assert dense(after)
    assert sum(map(len, after.values())) == 110


@pytest.mark.parametrize(("payload_bytes", "calls"), [(100, 1), (600_000, 2)])
def test_a_small_backlog_goes_to_redis_in_one_call_unless_it_is_heavy(
    streamer: Streamer, redis_client: redis.Redis, connection: Connection, things: Log, payload_bytes: int, calls: int
) -> None:
    """A Redis that receives many megabytes at once serves no other client meanwhile."""
    streamer.drain()
    redis_client.config_resetstat()
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', i, 'key', 'update', 'thing', to_jsonb(repeat(md5(i::text), %s)) FROM generate_series(0, 1) i",
        [payload_bytes // 32],
    )

    assert streamer.drain() == 2
    assert redis_client.info("commandstats")["cmdstat_multi"]["calls"] == calls


def test_scripts_that_the_server_has_forgotten_are_loaded_again(
    streamer: Streamer, publish: Publish, redis_client: redis.Redis, connection: Connection, things: Log
) -> None:
    """Guarantee 19."""
    publish(5)
    redis_client.script_flush()
    stage_rows(connection, things, 5, "again")

    assert streamer.drain() == 5


def test_scripts_forgotten_during_a_round_are_called_again_in_order(
    streamer: Streamer, redis_client: redis.Redis, connection: Connection, things: Log
) -> None:
    """Guarantee 19: several calls are in flight when the first one reports that the script is missing."""
    for again in range(5):
        stage_rows(connection, things, 2500, str(again))
        redis_client.script_flush()
        with capture_logs() as logs:
            assert streamer.drain() == 2500

        assert not [entry for entry in logs if entry["event"] == "log was behind"]


def test_a_redis_that_refuses_writes_keeps_records_in_postgres(
    streamer: Streamer, redis_client: redis.Redis, connection: Connection, things: Log
) -> None:
    """Guarantee 13: a refusal never counts as success."""
    streamer.open()
    redis_client.config_set("maxmemory", "1")
    try:
        stage_rows(connection, things, 5)
        with pytest.raises(AppendRefused, match="maxmemory"):
            streamer.drain()
    finally:
        redis_client.config_set("maxmemory", "0")

    assert streamer.drain() == 5


def test_a_key_of_another_type_stops_the_streamer(
    streamer: Streamer, redis_client: redis.Redis, connection: Connection, things: Log
) -> None:
    """Guarantee 30."""
    streamer.open()
    for shard in things.shard_names:
        redis_client.set(f"penstock:{{{shard}}}:log", "somebody else's")
    stage_rows(connection, things, 5)

    with pytest.raises(ForeignLog, match="another type"):
        streamer.drain()


def test_another_record_at_the_same_offset_stops_the_streamer(
    streamer: Streamer, redis_client: redis.Redis, connection: Connection, things: Log
) -> None:
    """Guarantee 30, invariant 3: the entry at the shared offset must have the same record id."""
    streamer.drain()
    for shard in things.shard_names:
        redis_client.xadd(f"penstock:{{{shard}}}:log", entry_of_a_record(999), id="1-0")
    stage_rows(connection, things, 5)

    with pytest.raises(HistoryDiverged, match=r"holds record 999, the journal has \d there: "):
        streamer.round()


def test_a_publisher_of_an_older_epoch_is_fenced_out(
    streamer: Streamer, redis_client: redis.Redis, connection: Connection, things: Log
) -> None:
    """Guarantee 3: a zombie of an older epoch writes nothing."""
    streamer.open()
    for shard in things.shard_names:
        redis_client.set(f"penstock:{{{shard}}}:epoch", "2")
    stage_rows(connection, things, 5)

    with pytest.raises(Fenced, match="epoch 2"):
        streamer.drain()


def test_large_payloads_end_a_batch_early(streamer: Streamer, connection: Connection, things: Log) -> None:
    """Memory is bounded by bytes, not only by the number of records."""
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'things', 0, i::text, 'insert', 'thing', to_jsonb(payload) FROM generate_series(1, 60) AS i, "
        "LATERAL (SELECT string_agg(md5(random()::text || i || j), '') AS payload FROM generate_series(1, 8000) AS j) p"
    )
    streamer.round()
    shard = things.shard_names[0]
    reading = unpublished(Store(connection), {shard: Offset(60)}, {}, epoch=Epoch(1), until=math.inf)
    with closing(reading) as batches:
        found = [(batch.first, batch.count) for batch in batches]

    assert all(1 <= count < 10 for _, count in found)
    assert [first for first, _ in found] == [1 + sum(c for _, c in found[:i]) for i in range(len(found))]
    assert sum(count for _, count in found) == 60


@pytest.mark.parametrize(("seconds", "tails"), [(0, {50}), (60, {51})])
def test_every_shard_is_published_in_a_round_however_short_it_is(
    site: Site, set_constants: SetConstants, seconds: float, tails: set[int]
) -> None:
    """Busy shards do not starve the others; while there is time, the round continues."""
    set_constants("streaming.publisher", ROUND_S=seconds)
    set_constants("streaming.unpublished", PACKED_RECORDS=50)
    many = Log("many", shards=64, keep=timedelta(hours=1))
    streamer = Streamer(Pipeline([many]), site.database_url, site.redis_url)
    try:
        streamer.open()
        site.connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
            "SELECT 'many', shard, 'k', 'a', 'o', '1' FROM generate_series(0, 63) shard, generate_series(1, 51)"
        )
        streamer.round()

        assert {streamer.opened().publisher.tails.log[shard] for shard in many.shard_names} == tails
    finally:
        streamer.close()


def test_a_hole_in_the_journal_is_never_skipped(
    streamer: Streamer, connection: Connection, things: Log, logged: ReadLog
) -> None:
    """Guarantee 3: an offset belongs to one record for ever, or to none."""
    for _ in range(3):
        stage_rows(connection, things, 20)
        tick(Store(connection))
    connection.execute(
        "DELETE FROM penstock.journal WHERE shard = 0 AND first_offset = "
        "(SELECT min(first_offset) FROM penstock.journal WHERE shard = 0 AND first_offset > 1)"
    )

    with pytest.raises(DamagedJournal, match=r"things/0 .*deleted by something other"):
        streamer.drain()
    damaged, other = things.shard_names
    assert logged(things)[damaged] == []
    assert len(logged(things)[other]) == journal_tails(Store(connection))[other]


@pytest.mark.parametrize("first", [1, 2], ids=["all", "the last"])
def test_journal_rows_deleted_before_they_are_published_stop_their_shards(
    streamer: Streamer, connection: Connection, things: Log, logged: ReadLog, set_constants: SetConstants, first: int
) -> None:
    """The streamer neither spins, waiting for records that never come, nor goes on as if nothing had been, then or later."""
    set_constants("channels.isolation", RETRY_EVERY_S=0.0)
    streamer.drain()
    for _ in range(2):
        stage_rows(connection, things, 20)
        streamer.opened().publisher.tails.advance_target(tick(Store(connection)).tails)
    connection.execute("DELETE FROM penstock.journal WHERE first_offset >= %s", [first])
    with capture_logs() as logs:
        done = [streamer.round() for _ in range(3)]

    assert [(each.backlog, each.idle) for each in done] == [(0, first == 1), (0, True), (0, True)]
    stopped = [each for each in logs if each["event"] == "shard unusable"]
    assert sorted(each["shard"] for each in stopped) == ["things/0", "things/1"]
    assert all("these rows of the journal are gone" in each["reason"] for each in stopped)
    published = logged(things)
    for _ in range(2):
        stage_rows(connection, things, 20)
        streamer.round()
        refresh_now(streamer)

    reasons = streamer.opened().publisher.unusable.errors
    assert [*map(str, sorted(reasons))] == ["things/0", "things/1"]
    assert logged(things) == published


def test_no_key_expires_and_all_keys_of_a_shard_share_a_slot(redis_client: redis.Redis, publish: Publish) -> None:
    publish(50)

    keys = redis_client.keys("*")
    assert sorted(keys) == [
        b"penstock:{things/0}:epoch",
        b"penstock:{things/0}:log",
        b"penstock:{things/1}:epoch",
        b"penstock:{things/1}:log",
    ]
    assert {redis_client.ttl(key) for key in keys} == {-1}
