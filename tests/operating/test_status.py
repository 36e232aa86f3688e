"""``status`` reports the true state."""

from collections.abc import Iterator, Sequence
from typing import Literal

import pytest
import redis
from sqlalchemy.orm import Session

from fixtures.clients import connect_redis
from fixtures.flow import OpenWorker, Publish, Site, stage_rows
from fixtures.inspecting import ReadStatus
from penstock import Log, Pipeline, Snooze
from penstock.channels.log.streams import evict
from penstock.consuming import WorkerSetup
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres, name_application
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.errors import SchemaMissing, ServerUnavailable
from penstock.operating.status import gathering
from penstock.operating.status.gathering import status
from penstock.operating.status.snapshot import Status
from penstock.records import Offset, Record
from penstock.streaming import Streamer


@pytest.fixture
def reader(flow: Pipeline, things: Log, database_url: str, redis_url: str) -> Iterator[LogWorker]:
    """A worker that is not open yet, so that its consumer is not registered."""
    flow.consumer(reads=things, name="reader")(lambda _session, _records: None)
    worker = LogWorker(WorkerSetup(flow, flow.get_consumer("reader"), database_url, redis_url))
    yield worker
    worker.close()


def totals(found: Status) -> tuple[int, int, int | None]:
    shards = found.channels[0].shards
    return (
        sum(s.staged for s in shards),
        sum(s.sequenced for s in shards),
        sum(s.published for s in shards if s.published is not None),
    )


def test_a_record_counts_as_staged_then_as_published_then_as_applied(
    connection: Connection, read_status: ReadStatus, things: Log, streamer: Streamer, reader: LogWorker
) -> None:
    stage_rows(connection, things, 10)
    before = read_status()
    streamer.drain()
    between = read_status()
    reader.drain()
    after = read_status()

    assert totals(before) == (10, 0, 0)
    assert max(s.staged_s for s in before.channels[0].shards) > 0
    assert before.consumers == ()
    assert totals(between) == (0, 10, 10)
    assert sum(s.lag for s in between.consumers[0].shards) == 10
    assert max(s.lag_s for s in between.consumers[0].shards) > 0
    assert [(s.lag, s.lag_s) for s in after.consumers[0].shards] == [(0, 0.0), (0, 0.0)]
    assert sum(s.applied for s in after.consumers[0].shards) == 10
    assert not any(shard.dead_letters for consumer in after.consumers for shard in consumer.shards)
    assert after.consumers[0].declared is True


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        ("", True),
        ("UPDATE penstock.checkpoints SET updated_at = updated_at - interval '2 min'", False),
        ("UPDATE penstock.checkpoints SET waiting = 'a lock'", False),
        ("UPDATE penstock.checkpoints SET halted = 'an error'", False),
        ("DELETE FROM penstock.staged_records", False),
        ("UPDATE penstock.channels SET kind = 'queue'", False),
        ("UPDATE penstock.checkpoints SET updated_at = updated_at - interval '30 s'", True),
    ],
)
def test_the_latency_of_a_shard_is_that_of_the_record_at_its_checkpoint(
    connection: Connection,
    read_status: ReadStatus,
    streamer: Streamer,
    reader: LogWorker,
    change: str,
    *,
    is_known: bool,
) -> None:
    """As long as the last move of the checkpoint says when that was."""
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, created_at) "
        "SELECT 'things', 0, 'k', 'insert', 'thing', '{}', clock_timestamp() - n * interval '10 s' "
        "FROM generate_series(3, 2, -1) n"
    )
    streamer.drain()
    reader.drain()
    if change:
        connection.execute(change.encode())
    [(expected,)] = connection.execute(
        "SELECT extract(epoch FROM updated_at - created_at)::float8 FROM penstock.checkpoints "
        "LEFT JOIN penstock.staged_records ON id = 2 WHERE checkpoints.shard = 0"
    ).fetchall()
    found, unasked = (
        [shard.latency_s for shard in read_status(with_latency=asks).consumers[0].shards] for asks in (True, False)
    )

    assert found == [pytest.approx(max(0, expected)) if is_known else None, None]
    assert unasked == [None, None]


def test_the_age_of_a_lag_is_that_of_the_first_record_not_yet_applied(
    connection: Connection, read_status: ReadStatus, flow: Pipeline, things: Log, streamer: Streamer
) -> None:
    flow.consumer(reads=things, name="reader")(lambda _session, _records: None)
    register_consumer(Store(connection, flow.scope), flow.get_consumer("reader"))
    stage_rows(connection, things, 20)
    connection.execute(
        "UPDATE penstock.staged_records SET created_at = created_at - interval '1 hour' WHERE id = "
        "(SELECT min(id) FROM penstock.staged_records WHERE shard = 1)"
    )
    streamer.drain()

    late = {s.shard: s.lag_s for s in read_status().consumers[0].shards}

    assert late[1] > 3599
    assert late[0] < 60


def test_the_oldest_open_transaction_is_named(read_status: ReadStatus, database_url: str) -> None:
    with connect_postgres(database_url, application="slow report") as slow:
        slow.execute("BEGIN")
        slow.execute("SELECT 1")
        found = read_status(None).oldest_transaction
        pid = slow.info.backend_pid

    assert found is not None
    assert found.application == name_application("slow report")
    assert found.state == "idle in transaction"
    assert found.pid == pid


def test_without_redis_everything_else_is_shown(connection: Connection, flow: Pipeline, things: Log) -> None:
    with connect_redis("redis://127.0.0.1:1/0") as away:
        found = status(Store(connection), away, flow)

    assert found.redis is not None
    assert [s.published for s in found.channels[0].shards] == [None, None]


def test_a_redis_that_does_not_answer_is_asked_once(
    connection: Connection, read_status: ReadStatus, streamer: Streamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another time-out would double the wait, also for the logs of sources."""
    streamer.drain()
    connection.execute(
        'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, source) '
        "VALUES ('reader', 'rides@eu', 0, 0, 1, 'eu')"
    )
    asked = []

    def refuse(*_: object) -> None:
        asked.append(1)
        raise ServerUnavailable("timed out")

    monkeypatch.setattr(gathering, "extents", refuse)

    found = read_status()

    assert (found.redis, len(asked)) == ("timed out", 1)


def test_the_last_run_of_each_reconciliation_is_shown(connection: Connection, read_status: ReadStatus) -> None:
    connection.execute(
        """
        INSERT INTO penstock.reconciliations (name, consumer, engine, intent, compared, missing, surplus, different, outcome, ended_at)
        VALUES ('copies', 'one', 'inline', 'compare', 9, 1, 1, 1, 'differs', clock_timestamp()),
               ('copies', 'one', 'inline', 'repair', 9, 0, 2, 0, 'repaired', clock_timestamp()),
               ('totals', 'two', 'inline', 'compare', NULL, NULL, NULL, NULL, 'running', NULL)
        """
    )

    shown = read_status(None).reconciliations

    assert [(r.name, r.intent, r.differences, r.outcome) for r in shown] == [
        ("copies", "repair", 2, "repaired"),
        ("totals", "compare", None, "running"),
    ]


def test_a_database_without_tables_names_the_command_to_run(postgres: object, redis_client: redis.Redis) -> None:
    url = postgres.database_url("postgres")  # type: ignore[attr-defined]  # the run's fixture
    with connect_postgres(url, application="test") as empty, pytest.raises(SchemaMissing, match="penstock init"):
        status(Store(empty), redis_client)


def test_status_takes_the_same_number_of_round_trips_for_any_number_of_shards(
    connection: Connection, redis_client: redis.Redis
) -> None:
    """One round trip per shard would make the status of many shards slow."""

    def statements_for(shards: int) -> int:
        pipeline = Pipeline([Log("many", shards=shards)])
        connection.execute("DELETE FROM penstock.channels")
        before = commands(redis_client)
        status(Store(connection), redis_client, pipeline)
        return commands(redis_client) - before

    # XINFO in one pipeline, one command per shard.  The least of several, because others may be using the server.
    many, few = (min(statements_for(shards) for _ in range(5)) for shards in (64, 2))
    assert many - few == 62


def commands(client: redis.Redis) -> int:
    info = client.info("stats")
    assert isinstance(info, dict)
    return int(info["total_commands_processed"])


def test_the_reason_why_a_shard_waits_is_shown(
    flow: Pipeline, things: Log, read_status: ReadStatus, open_worker: OpenWorker, publish: Publish
) -> None:
    """Guarantee 13: until the next record is applied."""
    asked = iter([True])

    def waits(_: Session, records: Sequence[Record]) -> None:
        if next(asked, False):
            raise Snooze(0.6, "the service is away")

    flow.consumer(reads=things, name="reader", isolation="READ COMMITTED")(waits)
    publish(1)
    with open_worker() as worker:
        worker.round(0)
        [(consumer, _, reason)] = read_status().waiting
        worker.drain()

    assert (consumer, reason) == ("reader", "waiting after Snooze: the service is away")
    assert read_status().waiting == ()


@pytest.mark.parametrize("entries", ["plain", "packed"])
def test_the_log_is_counted_in_records_whatever_its_entries_hold(
    site: Site, entries: Literal["plain", "packed"]
) -> None:
    things = Log("things", shards=1, entries=entries)
    flow = Pipeline([things])
    with Streamer(flow, site.database_url, site.redis_url) as streamer:
        for _ in range(3):
            stage_rows(site.connection, things, 20)
            streamer.drain()
    evict(site.client, "penstock", things.shard_names[0], Offset(30))

    [shard] = status(Store(site.connection), site.client, flow).channels[0].shards

    first = {"plain": 30, "packed": 21}[entries]
    assert (shard.first, shard.records, shard.published) == (first, 61 - first, 60)
    assert shard.entries == {"plain": 31, "packed": 2}[entries]
