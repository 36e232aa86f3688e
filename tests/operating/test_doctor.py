"""The doctor finds what is wrong, and names the command that fixes it."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.constants import SetConstants
from fixtures.flow import OpenWorker, Publish, stage_rows
from fixtures.inspecting import Diagnose, ReadStatus
from fixtures.libraries import Zstandard
from penstock import Log, Pipeline
from penstock.channels.routing import log_keys
from penstock.channels.server import check_eviction
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres, name_application
from penstock.database.store import Store
from penstock.embedded import EmbeddedPostgres, EmbeddedRedis, EmbeddedServers
from penstock.errors import UnsafeSetting
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.diagnosis import diagnose, worst
from penstock.records import Record
from penstock.schema.initialise import initialise
from penstock.streaming import Streamer, tick

Only = Callable[..., CheckResult]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServers]:
    """Both servers, configured correctly."""
    servers = EmbeddedServers(tmp_path_factory.mktemp("sound"))
    servers.start()
    initialise(servers.database_url)
    yield servers
    servers.remove()


@pytest.fixture
def reader(flow: Pipeline, things: Log, open_worker: OpenWorker) -> LogWorker:
    @flow.consumer(reads=things, attempts=1, on_poison="halt")
    def reader(_session: Any, records: Sequence[Record]) -> None:
        if any(record.key == "bad1" for record in records):
            raise ValueError("bad")

    return open_worker()


@pytest.fixture
def only(diagnosed: Diagnose) -> Only:
    """Returns the only finding of one check with one grade; by default without a pipeline."""

    def find(check: str, grade: str, pipeline: Pipeline | None = None, **others: Any) -> CheckResult:
        [finding] = diagnosed(check, grade, pipeline, **others)
        return finding

    return find


@pytest.mark.slow
def test_a_sound_system_passes_every_check(flow: Pipeline, things: Log, sound: EmbeddedServers) -> None:
    flow.consumer(reads=things, name="reader")(lambda _session, _records: None)
    with (
        connect_postgres(sound.database_url, application="test") as connection,
        connect_redis(sound.redis_url) as client,
    ):
        streamer = Streamer(flow, sound.database_url, sound.redis_url)
        stage_rows(connection, things, 10)
        streamer.drain()
        streamer.close()

        findings = diagnose(Store(connection), client, flow)

    assert [finding for finding in findings if finding.grade != "ok"] == []
    assert worst(findings) == "ok"
    assert {"postgres", "schema", "lineage", "keys", "journal", "eviction"} <= {f.check for f in findings}


def test_every_finding_that_is_not_ok_names_a_fix(connection: Connection, diagnosed: Diagnose) -> None:
    connection.execute("ALTER TABLE penstock.staged_records ALTER COLUMN id SET CACHE 20")

    findings = diagnosed()

    assert worst(findings) == "error"
    assert [f for f in findings if f.grade != "ok" and not f.fix] == []


def test_a_server_that_is_not_durable_is_an_error(only: Only) -> None:
    """The tests' own server is not durable."""
    assert "fsync" in only("durability", "error").message


def test_an_unreachable_redis_is_reported_once(diagnosed: Diagnose) -> None:
    with connect_redis("redis://127.0.0.1:1/0") as away:
        assert [finding.unreachable for finding in diagnosed(pipeline=None, client=away)].count(True) == 1


def test_missing_tables_are_fixed_by_init(postgres: EmbeddedPostgres, only: Only) -> None:
    with connect_postgres(postgres.database_url("postgres"), application="test") as empty:
        assert only("schema", "error", connection=empty).fix == "penstock init"


def test_an_older_schema_is_fixed_by_init(connection: Connection, only: Only) -> None:
    connection.execute("UPDATE penstock.alembic_version SET version_num = 'penstock_0000'")

    assert only("schema", "error").fix == "penstock init"


def test_a_long_transaction_is_named(database_url: str, set_constants: SetConstants, only: Only) -> None:
    set_constants("operating.doctor.database_checks", LONG_S=0)
    with connect_postgres(database_url, application="report") as slow:
        slow.execute("BEGIN")
        slow.execute("SELECT 1")
        finding = only("long transactions", "warning")
        pid = slow.info.backend_pid

    assert f"process {pid} ({name_application('report')}, idle in transaction)" in finding.message
    assert finding.fix.endswith(f"SELECT pg_terminate_backend({pid})")


def test_a_prepared_transaction_is_named(
    connection: Connection, database_url: str, set_constants: SetConstants, only: Only
) -> None:
    set_constants("operating.doctor.database_checks", LONG_S=0)
    with connect_postgres(database_url, application="test") as preparing:
        preparing.execute("BEGIN")
        preparing.execute("SELECT pg_current_xact_id()")
        preparing.execute("PREPARE TRANSACTION 'forgotten'")
    try:
        finding = only("prepared transactions", "warning")
    finally:
        connection.execute("ROLLBACK PREPARED 'forgotten'")

    assert "'forgotten'" in finding.message


def test_a_committed_record_without_an_offset_is_found(connection: Connection, publish: Publish, only: Only) -> None:
    publish(5)
    connection.execute(
        "INSERT INTO penstock.staged_records (xid, channel, shard, key, action, object, data) "
        "VALUES ('3', 'things', 0, 'k', 'a', 'o', '{}')"
    )

    finding = only("missed records", "error")

    assert "1 committed record without an offset" in finding.message


def test_rows_deleted_by_hand_are_found(connection: Connection, publish: Publish, diagnosed: Diagnose) -> None:
    for _ in range(4):
        publish(30)
    connection.execute(
        "DELETE FROM penstock.journal j WHERE shard = 0 AND first_offset = "
        "(SELECT first_offset FROM penstock.journal WHERE shard = 0 ORDER BY 1 OFFSET 1 LIMIT 1)"
    )
    connection.execute("DELETE FROM penstock.staged_records WHERE id = (SELECT max(id) FROM penstock.staged_records)")

    errors = diagnosed("journal", "error", None)

    assert [word in error.message for word, error in zip(("things/0: 1 holes", "gone"), errors, strict=True)]


def test_an_identity_cache_is_an_error(connection: Connection, only: Only) -> None:
    connection.execute("ALTER TABLE penstock.staged_records ALTER COLUMN id SET CACHE 20")

    assert "SET CACHE 1" in only("identity", "error").message


def test_ids_near_their_limit_are_an_error(connection: Connection, only: Only) -> None:
    """Guarantee 29."""
    connection.execute("SELECT setval(pg_get_serial_sequence('penstock.staged_records', 'id'), 5000000000000000)")

    assert "exact up to" in only("identity", "error").message


def test_a_changed_number_of_shards_is_an_error(streamer: Streamer, only: Only) -> None:
    streamer.drain()

    assert "of 3 shards" in only("channels", "error", Pipeline([Log("things", shards=3)])).message


def test_a_retired_channel_is_not_to_be_streamed(
    connection: Connection, flow: Pipeline, streamer: Streamer, diagnosed: Diagnose
) -> None:
    """A trigger of it goes on to stage."""
    streamer.drain()
    connection.execute("DELETE FROM penstock.channels")
    connection.execute("INSERT INTO penstock.retired_channels VALUES ('things')")
    stage_rows(connection, Log("things"), 1)
    tick(Store(connection, flow.scope))

    errors = diagnosed("channels", "error")

    assert [each.fix for each in errors] == [
        "find out what staged them; to remove them: penstock channels retire things --discard --apply",
        "Remove it from the pipeline; or reuse its name: penstock channels adopt things --apply",
    ]


def test_a_channel_that_nobody_declares_can_be_retired(streamer: Streamer, only: Only) -> None:
    streamer.drain()

    assert "penstock channels retire things --apply" in only("channels", "warning", Pipeline([])).fix


def test_a_missing_library_of_a_channel_is_an_error(
    database_url: str, redis_url: str, zstandard: Zstandard, only: Only
) -> None:
    flow = Pipeline([Log("things", shards=2, compression="zstd")])
    with Streamer(flow, database_url, redis_url) as streamer:
        streamer.drain()
    zstandard.remove()

    found = only("channels", "error", flow)

    assert found.message.startswith("things: a channel with compression='zstd' needs")
    assert found.fix == "pip install 'penstock-outbox[zstd]'"


def test_a_registered_but_undeclared_consumer_can_be_retired(
    flow: Pipeline, streamer: Streamer, reader: LogWorker, only: Only
) -> None:
    streamer.drain()

    finding = only("consumers", "warning", Pipeline([*flow.channels.values()]))

    assert finding.fix == (
        "declare it, or run penstock doctor for the pipeline that does; if it is gone for good: penstock consumers retire reader --apply"
    )


@pytest.mark.parametrize(
    ("name", "reported_by", "said"),
    [
        ("replay-3", None, "the same penstock replay … --apply continues it"),
        ("elsewhere", "another", "run elsewhere with its own database"),
    ],
)
def test_what_no_pipeline_here_can_declare_is_neither_retired_nor_started(
    connection: Connection,
    publish: Publish,
    reader: LogWorker,
    set_constants: SetConstants,
    name: str,
    reported_by: str | None,
    said: str,
    diagnosed: Diagnose,
    read_status: ReadStatus,
) -> None:
    """Retiring it would cancel the replay, or let a source lose what a consumer elsewhere has not read."""
    set_constants("operating.doctor.pipeline_checks", SLOW_S=-1.0)
    publish(3)
    connection.execute("UPDATE penstock.checkpoints SET consumer = %s, reported_by = %s", [name, reported_by])

    [shown] = read_status().consumers
    results = diagnosed("consumers", "warning")

    assert (shown.kind, shown.declared) == ("replay" if reported_by is None else "reported", None)
    assert results
    for each in results:
        assert each.fix.startswith(said), each
        assert "does not declare" not in each.message


def test_a_halted_shard_is_shown_with_the_command_to_resume_it(
    flow: Pipeline, publish: Publish, reader: LogWorker, only: Only
) -> None:
    publish(1, "bad")
    reader.drain()

    finding = only("consumers", "error", flow)

    assert "reader is halted in things/" in finding.message
    assert "reset checkpoint reader --resume" in finding.fix


def test_records_that_no_streamer_publishes_are_an_error(
    connection: Connection, flow: Pipeline, things: Log, set_constants: SetConstants, only: Only
) -> None:
    set_constants("operating.doctor.pipeline_checks", STALLED_S=0.0)
    stage_rows(connection, things, 3)

    finding = only("streamer", "error", flow)

    assert finding.message.startswith("things: 3 committed records waiting for the sequencer")
    assert "no streamer and no recruit has ticked since they were committed" in finding.message
    assert re.search(r"the last tick with records was [\d.]+ (s|min) ago$", finding.message)
    assert finding.fix.startswith("penstock stream")


def test_an_eviction_policy_that_may_evict_any_key_is_refused(redis_client: redis.Redis, only: Only) -> None:
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        finding = only("eviction", "error")
        with pytest.raises(UnsafeSetting, match="allkeys-lru"):
            check_eviction(redis_client)
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")

    assert finding.fix == "CONFIG SET maxmemory-policy noeviction"


def test_an_eviction_policy_for_volatile_keys_is_accepted(redis_client: redis.Redis) -> None:
    redis_client.config_set("maxmemory-policy", "volatile-lru")
    try:
        check_eviction(redis_client)
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")


def test_a_key_with_a_time_to_live_and_a_foreign_entry_are_found(
    redis_client: redis.Redis, publish: Publish, things: Log, diagnosed: Diagnose
) -> None:
    publish(20)
    first, second = (log_keys("penstock", shard).stream for shard in things.shard_names)
    redis_client.expire(first, 1000)
    redis_client.xadd(second, {"what": "is this"})

    errors = diagnosed("keys", "error", None)

    assert f"PERSIST {first}" in [error.fix for error in errors]
    assert any(second in error.fix for error in errors)


def test_a_foreign_key_in_place_of_a_shard_is_found(
    redis_client: redis.Redis, streamer: Streamer, things: Log, diagnosed: Diagnose
) -> None:
    streamer.drain()
    redis_client.set(log_keys("penstock", things.shard_names[0]).stream, "mine")

    assert diagnosed("keys", "error", None)


def test_a_log_ahead_of_the_journal_is_an_error(connection: Connection, publish: Publish, only: Only) -> None:
    publish(20)
    connection.execute("DELETE FROM penstock.journal; DELETE FROM penstock.staged_records")

    assert "reset epoch" in only("lineage", "error").message


def test_a_replica_is_an_error(redis_url: str, tmp_path: Path, only: Only) -> None:
    from penstock.embedded import EmbeddedRedis  # noqa: PLC0415  this test alone

    with (
        EmbeddedRedis(tmp_path / "replica", settings={"replicaof": "127.0.0.1 1"}) as replica,
        connect_redis(replica.url) as client,
    ):
        assert "replica" in only("redis", "error", client=client).message


def test_a_diagnosis_changes_nothing(connection: Connection, publish: Publish, flow: Pipeline, only: Only) -> None:
    """It does not even open an epoch when one is due."""
    publish(20)
    connection.execute("UPDATE penstock.epochs SET timeline = 77")
    tables = ("epochs", "ticks", "journal", "channels", "checkpoints")

    def everything() -> list[Any]:
        return [connection.execute(f"SELECT * FROM penstock.{t} ORDER BY 1".encode()).fetchall() for t in tables]

    before = everything()
    finding = only("lineage", "warning", flow)

    assert everything() == before
    assert "new epoch" in finding.fix


DISABLED = "ACL CONFIG DEBUG FLUSHALL FLUSHDB KEYS LATENCY MODULE MONITOR OBJECT SAVE SLOWLOG"


def test_a_redis_whose_provider_has_disabled_commands_is_no_error(
    connection: Connection, database_url: str, tmp_path: Path, diagnosed: Diagnose, only: Only
) -> None:
    things = Log("things", shards=1)
    flow = Pipeline([things])
    settings = {"appendonly": "no", **{f"rename-command {name}": '""' for name in DISABLED.split()}}
    with EmbeddedRedis(tmp_path / "redis", settings=settings) as server, connect_redis(server.url) as client:
        streamer = Streamer(flow, database_url, server.url)
        stage_rows(connection, things, 10)
        streamer.drain()
        streamer.close()

        assert (
            diagnosed("redis", "error", flow, client=client) == diagnosed("users", "error", flow, client=client) == []
        )
        warned = only("persistence", "warning", flow, client=client)

    assert "does not tell this user whether snapshots are on" in warned.message
