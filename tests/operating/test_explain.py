"""Each cause why a record is not further, brought about for real: ``explain`` names the first that holds."""

from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import redis

from fixtures.clients import connect_redis
from fixtures.flow import OpenWorker, Site, drop_limits, retain_now
from fixtures.roles import UrlFor
from penstock import Ick, Log, Pipeline, Queue
from penstock.channels.routing import ick_shard_keys, log_keys
from penstock.cli.commands.lookups import format_story
from penstock.clients import FairQueue, Reservation, Reservations
from penstock.consuming import make_worker
from penstock.consuming.log.log_worker import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.database.registry import register_consumer
from penstock.database.store import Store
from penstock.errors import ForeignLog, HiddenRows, PrivilegeMissing, Unknown
from penstock.operating import letters as dead_letters
from penstock.operating.tracing import story as tracing_story
from penstock.operating.tracing.causes import explain, trace
from penstock.operating.tracing.story import Diagnosis
from penstock.records import Offset, Place, RecordId, Shard, ShardName
from penstock.streaming import Streamer

things = Log("things", shards=2, keep=timedelta(hours=1))
index, jobs = Ick("index", shards=1), Queue("jobs", keep=timedelta(0))

INSERT = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data)
VALUES (%s, %s, %s, 'insert', 'thing', '{"secret": 1}') RETURNING id
"""


@pytest.fixture
def flow() -> Pipeline:
    """A pipeline with all kinds of channel, and a consumer of the log."""
    made = Pipeline([things, index, jobs])

    @made.consumer(reads=things, name="reader", attempts=1, park_key=True)
    def read(_session: object, records: Sequence[Any]) -> None:
        if any(record.key.startswith("bad") for record in records):
            raise ValueError("bad")

    return made


@pytest.fixture
def reader(open_worker: OpenWorker) -> LogWorker:
    return open_worker()


@pytest.fixture
def waiting(connection: Connection, flow: Pipeline) -> None:
    """The consumer is registered, and does not run."""
    register_consumer(Store(connection, flow.scope), flow.get_consumer("reader"))


def stage(connection: Connection, key: str = "k", channel: str = "things", shard: int = 0) -> int:
    [(record,)] = connection.execute(INSERT, (channel, shard, key)).fetchall()
    return int(record)


Why = Callable[[int | str | Place], Diagnosis]


@pytest.fixture
def why(connection: Connection, redis_client: redis.Redis) -> Why:
    def ask(wanted: int | str | Place) -> Diagnosis:
        known = RecordId(wanted) if isinstance(wanted, int) else wanted
        return explain(Store(connection), redis_client, known)

    return ask


def test_an_applied_record_has_its_whole_story(
    connection: Connection, redis_client: redis.Redis, why: Why, streamer: Streamer, reader: LogWorker
) -> None:
    record = stage(connection)
    streamer.drain()
    reader.drain()

    found = why(record)
    [story] = trace(Store(connection), redis_client, "k")

    assert (found.cause, found.is_applied) == ("applied", True)
    assert story.id == record
    assert (story.place, story.is_published, story.is_done) == ("things/0 offset 1", True, True)
    assert story.staged_at is not None
    assert story.sequenced_at is not None
    assert story.staged_at <= story.sequenced_at
    assert story.tick is not None
    assert story.transaction is not None
    [by] = story.readers
    assert (by.consumer, by.state, by.checkpoint) == ("reader", "applied", 1)
    assert by.at is not None
    assert by.at >= story.sequenced_at
    place = Place(ShardName("things", Shard(0)), Offset(1))
    assert trace(Store(connection), redis_client, place) == (story,)
    newest = stage(connection)
    streamer.drain()
    reader.drain()
    of_key = why("k").story
    assert of_key is not None
    assert of_key.id == newest


def test_the_tick_of_a_record_is_shown_while_the_one_before_it_is_kept(
    connection: Connection, redis_client: redis.Redis, streamer: Streamer
) -> None:
    """Without that one, an older tick may have seen the record as well."""
    newest, ticks = "SELECT max(tick) FROM penstock.ticks", []
    for key in ("k", "other"):
        stage(connection, key)
        streamer.drain()
        [(tick,)] = connection.execute(newest).fetchall()
        ticks.append(tick)

    def shown() -> list[int | None]:
        return [trace(Store(connection), redis_client, key)[0].tick for key in ("k", "other")]

    assert shown() == ticks
    connection.execute("DELETE FROM penstock.ticks WHERE tick < %s", [ticks[0]])
    assert shown() == [None, ticks[1]]


def test_the_newest_records_of_a_key_come_in_their_order_and_of_one_channel(
    connection: Connection, redis_client: redis.Redis
) -> None:
    records = [stage(connection) for _ in range(3)]

    def found(wanted: RecordId | str, **options: Any) -> list[int]:
        return [story.id for story in trace(Store(connection), redis_client, wanted, **options)]

    assert found("k", limit=2) == records[1:]
    assert found(RecordId(records[0]), channel="things") == records[:1]
    for wanted in ("k", RecordId(records[0])):
        with pytest.raises(Unknown):
            found(wanted, channel="index")


def test_earlier_shards_are_looked_up_only_after_resharding(
    site: Site, waiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("looked up")

    monkeypatch.setattr(tracing_story, "find_unpassed", refuse)
    stage(site.connection)
    site.streamer.drain()

    [story] = trace(Store(site.connection), site.client, "k")

    assert [each.state for each in story.readers] == ["behind"]


def test_an_open_transaction_is_named_without_its_statement(
    connection: Connection, redis_client: redis.Redis, why: Why, database_url: str
) -> None:
    with psycopg.connect(database_url, application_name="shop") as slow:
        record = stage(slow)
        by_id, by_key = why(record), why("k")
        shown = explain(Store(connection), redis_client, RecordId(record), with_query=True)
        pid = slow.info.backend_pid
        with psycopg.connect(database_url) as younger:
            stage(younger)
            both, younger_pid = why(record), younger.info.backend_pid

    assert [each.pid for each in both.writers] == [pid, younger_pid], "oldest first"
    assert (by_id.cause, by_key.cause) == ("open transaction", "open transaction")
    [writer] = by_id.writers
    assert (writer.pid, writer.application, writer.state) == (pid, "shop", "idle in transaction")
    assert writer.age_s is not None
    assert writer.query is None
    assert f"pg_terminate_backend({pid})" in str(by_id.fix)
    assert "INSERT" in str(shown.writers[0].query)
    assert why(record).cause == "not ticked"


def test_a_record_that_is_committed_while_it_is_looked_for_is_found(
    connection: Connection, why: Why, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer is gone, and would not be named."""
    read = tracing_story.StoryReader.read_writers
    with psycopg.connect(database_url) as slow:
        record = stage(slow)

        def commit(*arguments: Any, **options: Any) -> Any:
            slow.commit()
            return read(*arguments, **options)

        monkeypatch.setattr(tracing_story.StoryReader, "read_writers", commit)
        assert why(record).cause == "not ticked"


def test_a_prepared_transaction_is_named(connection: Connection, why: Why) -> None:
    connection.execute("BEGIN")
    record = stage(connection)
    connection.execute("PREPARE TRANSACTION 'left behind'")
    try:
        found = why(record)
    finally:
        connection.execute("ROLLBACK PREPARED 'left behind'")

    assert found.cause == "prepared transaction"
    assert "COMMIT PREPARED 'left behind'" in str(found.fix)
    assert why(record).cause == "rolled back"


def test_an_id_that_was_rolled_back_or_never_drawn_is_told_apart(
    connection: Connection, why: Why, streamer: Streamer
) -> None:
    connection.execute("BEGIN")
    record = stage(connection)
    connection.execute("ROLLBACK")

    assert why(record).cause == "rolled back"
    assert why(record + 1).cause == "unused id"
    stage(connection, "later")
    streamer.drain()
    assert why(record).cause == "rolled back", "retention has removed nothing"
    assert why("k").cause == "unknown key"


def test_a_committed_record_waits_for_a_streamer(connection: Connection, why: Why, streamer: Streamer) -> None:
    streamer.drain()
    streamer.close()
    record = stage(connection)

    found = why(record)

    assert found.cause == "not ticked"
    assert "no streamer is connected" in found.text
    assert "penstock stream" in str(found.fix)


def test_an_isolated_record_gets_no_offset(connection: Connection, why: Why, streamer: Streamer) -> None:
    streamer.drain()
    drop_limits(connection)
    record = stage(connection)
    connection.execute("UPDATE penstock.staged_records SET created_at = 'infinity'")
    streamer.drain()

    found = why(record)

    assert found.cause == "isolated"
    assert "created_at is infinity" in found.text
    connection.execute("UPDATE penstock.staged_records SET created_at = now(), xid = DEFAULT")
    assert why(record).cause == "not ticked", "its row was corrected"


def test_a_record_that_the_journal_lost_is_missed(connection: Connection, why: Why, streamer: Streamer) -> None:
    record = stage(connection)
    streamer.drain()
    connection.execute("DELETE FROM penstock.journal")

    assert why(record).cause == "missed"


def test_a_policy_may_hide_records_from_the_streamer(connection: Connection, why: Why) -> None:
    record = stage(connection)
    connection.execute("ALTER TABLE penstock.staged_records ENABLE ROW LEVEL SECURITY")

    found = why(record)

    assert found.cause == "row policy"
    assert "BYPASSRLS" in str(found.fix)


@pytest.mark.parametrize(("channel", "shard"), [("typo", 0), ("things", 7)])
def test_a_shard_that_no_channel_has_is_unknown(
    connection: Connection, why: Why, streamer: Streamer, channel: str, shard: int
) -> None:
    record = stage(connection, channel=channel, shard=shard)
    streamer.drain()

    assert why(record).cause == "unknown shard"


def test_a_record_of_a_retired_channel_is_to_be_removed(connection: Connection, why: Why, streamer: Streamer) -> None:
    connection.execute("INSERT INTO penstock.retired_channels VALUES ('gone')")
    record = stage(connection, channel="gone")
    streamer.drain()

    found = why(record)

    assert found.cause == "retired channel"
    assert "penstock channels retire gone --discard --apply" in str(found.fix)


def test_a_shard_that_the_streamer_leaves_out_says_why(
    connection: Connection, redis_client: redis.Redis, why: Why, streamer: Streamer, waiting: None
) -> None:
    redis_client.set(log_keys("penstock", ShardName("things", Shard(0))).stream, "foreign")
    record = stage(connection)
    with pytest.raises(ForeignLog):
        streamer.drain()

    found = why(record)

    assert found.cause == "stopped shard"
    assert "another type" in found.text or "holds" in found.text


def test_a_redis_that_does_not_answer_is_part_of_the_answer(
    connection: Connection, streamer: Streamer, waiting: None
) -> None:
    record = stage(connection)
    streamer.drain()

    with connect_redis("redis://127.0.0.1:1/0") as away:
        found = explain(Store(connection), away, RecordId(record))
        [story] = trace(Store(connection), away, RecordId(record))

    assert found.cause == "no answer from Redis"
    assert (story.offset, story.is_published) == (1, None)


def test_a_log_without_consumers_has_no_reader(connection: Connection, why: Why, streamer: Streamer) -> None:
    record = stage(connection)
    streamer.drain()
    connection.execute("DELETE FROM penstock.checkpoints")

    assert why(record).cause == "no reader"


def test_a_consumer_is_behind_waits_is_halted_or_stands_at_a_barrier(
    connection: Connection, why: Why, streamer: Streamer, waiting: None
) -> None:
    stage(connection)
    record = stage(connection)
    streamer.drain()
    barrier = (
        'INSERT INTO penstock.barriers (consumer, channel, shard, "offset", run, expires_at) '
        "VALUES ('reader', 'things', 0, 0, 'r', now() + interval '1 min')"
    )
    causes = [why(record)]
    for change in (
        "UPDATE penstock.checkpoints SET waiting = 'a lock'",
        barrier,
        "UPDATE penstock.checkpoints SET halted = 'because'",
        "DELETE FROM penstock.checkpoints WHERE shard = 0",
    ):
        connection.execute(change.encode())
        causes.append(why(record))

    assert [each.cause for each in causes] == ["behind", "waiting", "barrier", "halted", "unread"]
    assert "1 record before it" in causes[0].text
    assert "a lock" in causes[1].text
    assert "because" in causes[3].text
    assert "--resume" in str(causes[3].fix)


def test_of_several_consumers_the_one_that_needs_an_operator_is_explained(
    connection: Connection, why: Why, streamer: Streamer, waiting: None
) -> None:
    record = stage(connection)
    streamer.drain()
    connection.execute(
        'INSERT INTO penstock.checkpoints (consumer, channel, shard, "offset", epoch, halted, waiting) '
        "VALUES ('a', 'things', 0, 0, 1, NULL, 'a lock'), ('z', 'things', 0, 0, 1, 'because', NULL), "
        "('y', 'things', 1, 0, 1, NULL, NULL), ('y', 'others', 0, 9, 1, NULL, NULL)"
    )

    found = why(record)

    assert found.cause == "halted"
    assert found.text.endswith("also: y unread, a waiting, reader behind")


def test_dead_letters_and_what_is_parked_behind_them(
    connection: Connection, why: Why, streamer: Streamer, reader: LogWorker
) -> None:
    record, behind = stage(connection, "bad"), stage(connection, "bad")
    streamer.drain()
    reader.drain()

    first, second = why(record), why(behind)

    assert (first.cause, second.cause) == ("dead-lettered", "parked")
    assert str(first.fix).endswith("dead-letters retry reader 'things/0 offset 1'")
    assert str(second.fix).endswith("dead-letters retry reader 'things/0 offset 1' --parked")
    assert why("bad").story == first.story


def test_a_dead_letter_is_explained_after_retention_has_removed_its_record(
    connection: Connection, why: Why, streamer: Streamer, reader: LogWorker
) -> None:
    """A connected streamer has nothing to do with it."""
    record = stage(connection, "bad")
    streamer.drain()
    stage(connection)
    streamer.drain()
    reader.drain()
    connection.execute("UPDATE penstock.journal SET created_at = now() - interval '2h'")
    assert retain_now(streamer) == 1

    found = why(record)

    assert found.cause == "dead-lettered", found
    assert str(found.fix).endswith("dead-letters retry reader 'things/0 offset 1'")
    assert found.story is not None
    assert any("things/0 offset 1" in line for line in format_story(found.story))


def test_the_dead_letters_of_icks_and_queues_are_named_by_what_the_retry_takes(
    connection: Connection, why: Why, flow: Pipeline, streamer: Streamer, database_url: str, redis_url: str
) -> None:
    @flow.consumer(reads=index, name="indexer", attempts=1)
    def read(_session: object, members: Sequence[str]) -> None:
        raise ValueError(f"{len(members)} bad")

    @flow.worker(reads=jobs, name="doer", attempts=1)
    def do(_session: object, job: object) -> None:
        raise ValueError(f"bad {bool(job)}")

    workers = [make_worker(flow, flow.get_consumer(name), database_url, redis_url) for name in ("indexer", "doer")]
    records = []
    for channel in ("index", "jobs"):
        stage(connection, "first", channel)
        records.append(stage(connection, "second", channel))
    streamer.drain()
    for worker in workers:
        with closing(worker):
            worker.drain()

    for record, name in zip(records, ("indexer", "doer"), strict=True):
        found = why(record)
        assert found.cause == "dead-lettered", found
        [letter] = [
            each
            for each in dead_letters.of_consumer(Store(connection), name)
            if each.record_id == record or each.key == "second"
        ]
        assert str(found.fix).endswith(f"dead-letters retry {name} '{letter.place}'")


def test_a_replay_and_a_consumer_of_another_database_are_not_started_here(
    connection: Connection, why: Why, streamer: Streamer, waiting: None
) -> None:
    record = stage(connection)
    streamer.drain()
    connection.execute("UPDATE penstock.checkpoints SET consumer = 'replay-3'")
    replay = why(record)
    connection.execute("UPDATE penstock.checkpoints SET consumer = 'elsewhere', reported_by = 'another'")
    reported = why(record)

    assert (replay.cause, reported.cause) == ("behind", "behind")
    assert "penstock consume " not in f"{replay.fix} {reported.fix}"
    assert "penstock replay … --apply continues it" in str(replay.fix)
    assert "run elsewhere with its own database" in str(reported.fix)


def test_a_record_that_retention_has_removed(
    connection: Connection, why: Why, streamer: Streamer, reader: LogWorker
) -> None:
    record = stage(connection)
    streamer.drain()
    later = stage(connection)
    streamer.drain()
    reader.drain()
    connection.execute("UPDATE penstock.journal SET created_at = now() - interval '2h'")
    assert retain_now(streamer) == 1

    assert why(record).cause == "removed, or rolled back"
    assert why(later).cause == "applied"
    with pytest.raises(Unknown, match="retention"):
        why(Place(ShardName("things", Shard(0)), Offset(1)))


def test_a_member_of_an_ick_is_dirty_held_and_done(
    connection: Connection, redis_client: redis.Redis, why: Why, flow: Pipeline, streamer: Streamer
) -> None:
    @flow.consumer(reads=index, name="indexer")
    def read(_session: object, members: Sequence[str]) -> None:
        del members

    register_consumer(Store(connection, flow.scope), flow.get_consumer("indexer"))
    record = stage(connection, "m", "index")
    streamer.drain()
    dirty = why(record)
    ick = ick_shard_keys("penstock", ShardName("index", Shard(0))).name
    reservations = Reservations(redis_client, ick, holder="me", size=3)
    taken = reservations.reserve()
    assert isinstance(taken, Reservation)
    held = why(record)
    reservations.commit(taken, ["m"])
    done = why(record)

    later = stage(connection, "m", "index")
    streamer.drain()

    assert [each.cause for each in (dirty, held, done)] == ["dirty", "held", "applied"]
    assert [why(each).cause for each in (record, later)] == ["applied", "dirty"]
    [story] = trace(Store(connection), redis_client, RecordId(record))
    assert [reader.state for reader in story.readers] == ["applied"], "whatever its checkpoint is"


def test_a_message_waits_is_leased_and_is_done(
    connection: Connection, redis_client: redis.Redis, why: Why, flow: Pipeline, streamer: Streamer
) -> None:
    @flow.worker(reads=jobs, name="doer")
    def do(_session: object, job: object) -> None:
        del job

    register_consumer(Store(connection, flow.scope), flow.get_consumer("doer"))
    record = stage(connection, "tenant", "jobs")
    later = stage(connection, "tenant", "jobs")
    connection.execute(
        """UPDATE penstock.staged_records SET headers = '{"penstock": {"delay_ms": 7200000}}' WHERE id = %s""", [later]
    )
    streamer.drain()
    waiting, delayed = why(record), why(later)
    with FairQueue(redis_client, "jobs").reader() as reader:
        [lease] = reader.read()
        connection.execute("INSERT INTO penstock.cancellations VALUES (%s, 'jobs', 0, false)", [record])  # too late
        leased = why(record)
        connection.execute("SELECT penstock.finish_records('jobs', %s)", ([record],))
        lease.done()

    assert [each.cause for each in (waiting, delayed, leased)] == ["waiting", "delayed", "leased"]
    assert why(record).cause == "applied"


def test_a_viewer_gets_the_same_answers(site: Site, why: Why, database_url_for: UrlFor, waiting: None) -> None:
    record = stage(site.connection)
    site.streamer.drain()
    with (
        psycopg.connect(site.database_url, application_name="shop") as slow,
        connect_postgres(database_url_for("a_viewer"), application="test") as viewer,
    ):
        hidden = stage(slow)
        seen, unseen = (explain(Store(viewer), site.client, RecordId(n)) for n in (record, hidden))

        assert seen == why(record)
        assert unseen.cause == why(hidden).cause == "open transaction"
        assert [each.state for each in unseen.writers] == ["idle in transaction"]


def test_a_role_without_the_rights_is_refused_or_shown_what_is_hidden(
    connection: Connection, redis_client: redis.Redis, database_url: str, database_url_for: UrlFor
) -> None:
    with psycopg.connect(database_url) as slow:
        record = stage(slow)
        with (
            connect_postgres(database_url_for("a_streamer"), application="test") as role,
            pytest.raises(PrivilegeMissing, match="dead_letters"),
        ):
            explain(Store(role), redis_client, RecordId(record))
        with connect_postgres(database_url_for("a_consumer"), application="test") as role:
            with pytest.raises(PrivilegeMissing, match="staged_records_id_seq"):
                explain(Store(role), redis_client, RecordId(record))
            connection.execute("GRANT SELECT ON SEQUENCE penstock.staged_records_id_seq TO a_consumer")
            found = explain(Store(role), redis_client, RecordId(record))

    assert found.cause == "open transaction"
    assert found.writers[0].state is None
    assert "GRANT pg_read_all_stats" in str(found.fix)


def test_a_policy_that_applies_to_this_role_is_an_error_and_not_an_answer(
    connection: Connection, redis_client: redis.Redis, database_url_for: UrlFor
) -> None:
    record = stage(connection)
    url = database_url_for("a_viewer")
    connection.execute("ALTER TABLE penstock.staged_records ENABLE ROW LEVEL SECURITY")

    with connect_postgres(url, application="test") as viewer, pytest.raises(HiddenRows):
        explain(Store(viewer), redis_client, RecordId(record))


def test_a_record_is_found_in_its_shard_of_a_newer_generation(
    connection: Connection, why: Why, streamer: Streamer, reader: LogWorker
) -> None:
    streamer.drain()
    reader.drain()
    connection.execute("UPDATE penstock.channels SET generations = '{3}', first_shard = 2 WHERE channel = 'things'")
    record = stage(connection)
    streamer.close()
    streamer.drain()

    found = why(record)

    assert found.story is not None
    assert found.story.shard in {2, 3, 4}
    assert found.story.is_known
    assert found.cause == "behind"
