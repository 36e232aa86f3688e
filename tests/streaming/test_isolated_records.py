"""Rows that a hostile or broken producer inserts: each is isolated and named, and everything else flows."""

import psycopg
import pytest
import redis
from structlog.testing import capture_logs

from fixtures.constants import SetConstants
from fixtures.flow import Publish, ReadLog, Site, drop_limits, stage_rows
from fixtures.intervals import refresh_now
from penstock import Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.database.connections import Connection, connect_postgres
from penstock.database.registry import register_channel
from penstock.database.store import Store
from penstock.errors import HistoryDiverged
from penstock.journal.journal_reader import missed_records
from penstock.operating.doctor.diagnosis import diagnose
from penstock.operating.reset.epoch import reset_epoch
from penstock.operating.status.gathering import status
from penstock.streaming import Streamer

DEFAULTS = {"channel": "'things'", "shard": "0", "created_at": "now()", "xid": "DEFAULT"}
LAST_XID = "18446744073709551615"


@pytest.fixture(autouse=True)
def _no_limits(connection: Connection) -> None:
    drop_limits(connection)


def insert(connection: Connection, data: str = "'\"canary\"'", **columns: str) -> int:
    """Inserts a row by plain SQL, as a producer with INSERT may; returns its id."""
    given = DEFAULTS | columns
    names = ", ".join(given)
    row = connection.execute(
        f"INSERT INTO penstock.staged_records ({names}, key, action, object, data) OVERRIDING SYSTEM VALUE "
        f"VALUES ({', '.join(given.values())}, 'k', 'update', 'thing', {data}) RETURNING id".encode()
    ).fetchone()
    assert row is not None
    return int(row[0])


def refresh(streamer: Streamer) -> None:
    refresh_now(streamer)
    streamer.round()


HOSTILE = {
    "created_at = infinity": {"created_at": "'infinity'"},
    "created_at = -infinity": {"created_at": "'-infinity'"},
    "created_at in the last year": {"created_at": "'294276-12-31 23:59:59.999999'"},
    "created_at BC": {"created_at": "'4713-01-01 BC'"},
    "the last xid": {"xid": f"'{LAST_XID}'"},
    "an xid far ahead": {"xid": "(pg_current_xact_id()::text::bigint + 1000000)::text::xid8"},
    "xid = 1": {"xid": "'1'"},
    "xid = 2": {"xid": "'2'"},
    "the last id": {"id": "9223372036854775807"},
    "a negative id": {"id": "-5"},
    "a long channel": {"channel": "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 200) i)"},
}  # fmt: skip


# Some of them among more records than a tick hands on by itself.
AMONG_MANY = ["created_at = infinity", "the last xid", "xid = 1", "a long channel"]


@pytest.mark.parametrize(("how", "many"), [*((how, 20) for how in HOSTILE), *((how, 3000) for how in AMONG_MANY)])
def test_a_hostile_row_is_isolated_and_named_and_everything_else_flows(site: Site, how: str, many: int) -> None:
    """Guarantees 2 and 32: nothing healthy is lost, doubled or out of order, before and after it, in its tick and in others."""
    site.streamer.drain()
    stage_rows(site.connection, site.things, 20, "before")
    with site.connection.transaction():
        stage_rows(site.connection, site.things, many, "with")
        record = insert(site.connection, **HOSTILE[how])
    stage_rows(site.connection, site.things, 20, "after")

    with capture_logs() as logs:
        site.streamer.drain()
        refresh(site.streamer)
        site.streamer.close()
        site.streamer.drain()  # a streamer starts with it as well
        refresh(site.streamer)

    for records in site.log().values():
        assert [r.offset for r in records] == list(range(1, len(records) + 1))
        assert [r.id for r in records] == sorted(r.id for r in records)
    assert sum(map(len, site.log().values())) == many + 40
    named = [each["record"] for each in logs if each["event"] == "record isolated"]
    assert named == [record]
    assert "canary" not in str(logs)
    found = status(Store(site.connection), site.client).faults.isolated
    assert [each.id for each in found.first] == [record]
    [error] = [r for r in diagnose(Store(site.connection), site.client) if r.check == "isolated records"]
    assert (error.grade, str(record) in error.message) == ("error", True)


def test_a_corrected_row_is_sequenced_and_no_longer_isolated(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log, logged: ReadLog
) -> None:
    """As doctor advises."""
    for columns in ({"created_at": "'infinity'"}, {"xid": "'1'"}, {"xid": f"'{LAST_XID}'"}, {"xid": "'1'"}):
        insert(connection, **columns)
        streamer.drain()
        refresh(streamer)
    fixes = [r.fix for r in diagnose(Store(connection), redis_client) if r.check == "isolated records"]
    assert len(fixes) == 4
    for fix in fixes:
        connection.execute(fix.removeprefix("correct it: ").split(";")[0].encode())

    assert streamer.drain() == 4
    assert len(logged(things)[things.shard_names[0]]) == 4
    assert status(Store(connection), redis_client).faults.isolated.count == 0
    assert missed_records(Store(connection)) == []


def test_a_row_whose_xid_has_come_is_sequenced_and_no_longer_isolated(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis
) -> None:
    [(current,)] = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchall()
    insert(connection, xid=f"'{current + 200}'")
    refresh(streamer)
    assert status(Store(connection), redis_client).faults.isolated.count == 1
    newest = current
    while newest <= current + 200:
        [(newest,)] = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchall()

    assert streamer.drain() == 1
    assert status(Store(connection), redis_client).faults.isolated.count == 0


def test_a_row_with_the_xid_of_a_running_transaction_is_sequenced_once(
    streamer: Streamer, publish: Publish, connection: Connection, database_url: str, things: Log, logged: ReadLog
) -> None:
    """Guarantee 1: it was found by the tick of its commit, and again by that of the other transaction's."""
    streamer.drain()
    with connect_postgres(database_url, application="running") as running:
        with running.transaction():
            row = running.execute("SELECT pg_current_xact_id()::text").fetchone()
            assert row is not None
            insert(connection, xid=f"'{row[0]}'")
            streamer.drain()
            ticks = connection.execute("SELECT count(*) FROM penstock.ticks").fetchone()
            for _ in range(5):
                streamer.round()
            assert connection.execute("SELECT count(*) FROM penstock.ticks").fetchone() == ticks
        streamer.drain()
        publish(10)

    assert sum(map(len, logged(things).values())) == 11


def test_a_flood_of_hostile_rows_is_counted_and_the_first_are_named(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log
) -> None:
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, created_at) "
        "SELECT 'things', 0, 'k', 'a', 'o', '1', 'infinity' FROM generate_series(1, 5000)"
    )
    stage_rows(connection, things, 10)
    with capture_logs() as logs:
        assert streamer.drain() == 10
        refresh(streamer)

    assert len([each for each in logs if each["event"] == "record isolated"]) == 20
    assert [each["records"] for each in logs if each["event"] == "more records isolated"] == [4980]
    assert status(Store(connection), redis_client).faults.isolated.count == 5000


@pytest.mark.parametrize(
    ("channel", "shard"), [("nope", 0), ("things", 2), ("things", -1), ("a}:b{\x1b[31m/c", 2**31 - 1), ("", 0)]
)
def test_records_of_an_unknown_shard_are_named_and_not_published(site: Site, channel: str, shard: int) -> None:
    site.connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT %s, %s, 'k', 'a', 'o', '\"canary\"' FROM generate_series(1, 3)",
        [channel, shard],
    )
    stage_rows(site.connection, site.things, 10)
    with capture_logs() as logs:
        site.streamer.drain()
        refresh(site.streamer)
        refresh(site.streamer)

    assert sum(map(len, site.log().values())) == 10
    assert len(site.client.keys("*:log")) == 2
    [entry] = [each for each in logs if each["event"] == "shard unknown"]
    assert (entry["shard"], entry["records"], entry["first_record"]) == (f"{channel}/{shard}", 3, 1)
    [unknown] = status(Store(site.connection), site.client).faults.unknown
    assert (unknown.shard.channel, unknown.shard.shard, unknown.records) == (channel, shard, 3)
    [error] = [r for r in diagnose(Store(site.connection), site.client) if r.check == "channels" and r.grade == "error"]
    assert "3 records (the first is 1)" in error.message


def test_records_of_a_channel_that_is_registered_later_are_published_then_in_order(
    streamer: Streamer, connection: Connection, things: Log, logged: ReadLog
) -> None:
    """As when an application is deployed before its streamer."""
    streamer.drain()
    later = Log("later", shards=2)
    stage_rows(connection, later, 2000)
    streamer.drain()
    stage_rows(connection, later, 5)
    streamer.drain()
    assert sum(map(len, logged(later).values())) == 0

    register_channel(Store(connection), later)
    streamer.drain()

    for records in logged(later).values():
        assert [r.offset for r in records] == list(range(1, len(records) + 1))
        assert [r.id for r in records] == sorted(r.id for r in records)
    assert sum(map(len, logged(later).values())) == 2005


def test_many_unknown_channels_do_not_slow_a_round(
    streamer: Streamer, connection: Connection, redis_client: redis.Redis, things: Log
) -> None:
    """Each takes a journal row; no round asks Redis or the journal about it."""
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT 'c' || i, i, 'k', 'a', 'o', '1' FROM generate_series(1, 5000) i"
    )
    stage_rows(connection, things, 10)
    assert streamer.drain() == 10
    redis_client.config_resetstat()
    refresh(streamer)

    assert redis_client.info("commandstats")["cmdstat_xinfo|stream"]["calls"] == 2
    assert len(status(Store(connection), redis_client).faults.unknown) == 20


@pytest.mark.storm  # Postgres writes a gigabyte; its quicker neighbour is spoil_record in test_stopped_shards.py
@pytest.mark.timeout(400)
def test_a_payload_that_postgres_cannot_write_as_text_stops_its_shard_only(
    streamer: Streamer, connection: Connection, things: Log, logged: ReadLog
) -> None:
    """A jsonb number of 5 bytes can have 131,072 digits: together more text than a value can have."""
    streamer.drain()
    record = insert(connection, "(SELECT jsonb_agg('1e131071'::numeric) FROM generate_series(1, 8300))", shard="0")
    stage_rows(connection, things, 10, "after")
    with capture_logs() as logs:
        for _ in range(2):
            streamer.round()

    damaged, other = things.shard_names
    assert logged(things)[damaged] == []
    assert len(logged(things)[other]) > 0
    [stopped] = [each for each in logs if each["event"] == "shard unusable"]
    assert stopped["shard"] == "things/0"
    assert f"offset 1 (record {record}): Postgres cannot read it" in stopped["reason"]


def test_a_reset_epoch_leaves_isolated_records_isolated(
    streamer: Streamer, flow: Pipeline, connection: Connection, redis_client: redis.Redis, things: Log
) -> None:  # fmt: skip
    stage_rows(connection, things, 10)
    insert(connection, created_at="'infinity'")
    streamer.drain()
    streamer.close()
    for shard in things.shard_names:
        redis_client.set(f"penstock:{{{shard}}}:epoch", 7)
    with pytest.raises(HistoryDiverged):
        streamer.open()
    streamer.close()

    assert not reset_epoch(connection, redis_client, flow, apply=True).unsequenced
    stage_rows(connection, things, 10)
    assert streamer.drain() == 10


@pytest.mark.parametrize("xid", ["1", "older"])
def test_a_record_that_a_reset_epoch_sequences_is_no_longer_isolated(site: Site, publish: Publish, xid: str) -> None:
    """Guarantee 2: what doctor advises for an isolated one would give it a second offset."""
    [(older,)] = site.connection.execute("SELECT pg_current_xact_id()::text").fetchall()
    publish(10)
    insert(site.connection, xid=f"'{older if xid == 'older' else xid}'")
    site.streamer.drain()
    refresh(site.streamer)
    assert status(Store(site.connection), site.client).faults.isolated.count == 1
    site.streamer.close()
    site.client.set(log_keys("penstock", site.things.shard_names[0]).epoch, 7)

    assert reset_epoch(site.connection, site.client, site.flow, apply=True).unsequenced == {"things/0": 1}
    site.streamer.drain()
    refresh(site.streamer)

    assert sum(map(len, site.log().values())) == 11
    assert status(Store(site.connection), site.client).faults.isolated.count == 0


# --- an xid of this database, but an older one ---


def test_a_record_with_an_old_xid_is_named_and_sequenced_once_it_is_corrected(site: Site, publish: Publish) -> None:
    """Guarantee 32: no tick finds it."""
    [(old,)] = site.connection.execute("SELECT pg_current_xact_id()::text").fetchall()
    publish(10)
    with site.connection.transaction():
        stage_rows(site.connection, site.things, 10, "with")
        record = insert(site.connection, xid=f"'{old}'")
    with capture_logs() as logs:
        site.streamer.drain()
        refresh(site.streamer)

    assert sum(map(len, site.log().values())) == 20
    assert [each["record"] for each in logs if each["event"] == "record isolated"] == [record]
    [error] = [r for r in diagnose(Store(site.connection), site.client) if r.check == "isolated records"]
    assert f"xid is {old}, of a transaction that ended before" in error.message
    site.connection.execute(error.fix.removeprefix("correct it: ").split(";")[0].encode())
    assert site.streamer.drain() == 1
    assert status(Store(site.connection), site.client).faults.isolated.count == 0
    assert missed_records(Store(site.connection)) == []


def test_no_record_of_an_ordinary_producer_is_taken_for_one_with_an_old_xid(
    streamer: Streamer, connection: Connection, database_url: str, things: Log
) -> None:
    """Transactions that began long before, that are committed late, and that drew their ids early."""
    others = [psycopg.connect(database_url) for _ in range(4)]
    try:
        streamer.drain()
        for number, other in enumerate(others):
            if number % 2:
                other.execute("SELECT pg_current_xact_id()")
            else:
                other.execute("SELECT nextval(pg_get_serial_sequence('penstock.staged_records', 'id'))")
        for other in others:
            stage_rows(connection, things, 5)
            refresh(streamer)
            stage_rows(other, things, 5, "late")
            refresh(streamer)
            stage_rows(other, things, 5, "later")
            other.commit()
            refresh(streamer)
    finally:
        for other in others:
            other.close()

    assert connection.execute("SELECT count(*) FROM penstock.isolated_records").fetchone() == (0,)


def test_a_row_with_an_old_xid_that_the_next_tick_finds_is_not_isolated(
    streamer: Streamer, publish: Publish, connection: Connection, things: Log, logged: ReadLog
) -> None:
    """Guarantee 2: nothing was sequenced since that transaction ended.  Corrected, it would be sequenced twice."""
    publish(1)
    [(xid,)] = connection.execute("SELECT pg_current_xact_id()::text").fetchall()
    refresh(streamer)
    record = insert(connection, xid=f"'{xid}'")
    refresh(streamer)
    streamer.drain()
    refresh(streamer)

    assert [r.id for records in logged(things).values() for r in records if r.id == record] == [record]
    assert connection.execute("SELECT record_id FROM penstock.isolated_records").fetchall() == []


def test_rows_are_examined_for_old_xids_a_part_at_a_time(
    streamer: Streamer, connection: Connection, things: Log, set_constants: SetConstants
) -> None:
    set_constants("streaming.faults", MAX_EXAMINED=10)
    [(old,)] = connection.execute("SELECT pg_current_xact_id()::text").fetchall()
    stage_rows(connection, things, 1)
    streamer.drain()  # a tick sees that it has ended
    refresh(streamer)
    stage_rows(connection, things, 35)
    insert(connection, xid=f"'{old}'")

    for isolated in (0, 0, 0, 1, 1):
        refresh(streamer)
        found = connection.execute("SELECT count(*) FROM penstock.isolated_records").fetchone()
        assert found == (isolated,)
