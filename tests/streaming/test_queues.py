"""From the staged row to the message in Redis, until its effect is recorded: nothing is lost, whatever Redis forgets."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
import redis
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from fixtures.clients import RedisClient, connect_redis
from fixtures.constants import SetConstants
from fixtures.crash_points import QUEUE_CRASH_POINTS, Killed, at_crash_points
from fixtures.flow import Site, retain_now
from penstock import Log, Pipeline, Queue, Unique, limit, stage, stage_many
from penstock.channels.routing import choose_hand
from penstock.clients import FairQueue, Lease
from penstock.crash_points import install_crashpoint
from penstock.database.connections import Connection
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.declaring.unique import KeyLimits, TenantLimits
from penstock.errors import Fenced, HistoryDiverged, InvalidMessage, QueueDamaged
from penstock.journal.journal_reader import missed_records
from penstock.streaming import Streamer
from penstock.testing import eventually

NAME = "jobs"
JOB: Any = {"action": "send", "object": "receipt"}


@pytest.fixture
def jobs(request: pytest.FixtureRequest) -> Queue:
    return Queue(NAME, keep=timedelta(0), **getattr(request, "param", {}))


@pytest.fixture
def flow(jobs: Queue) -> Pipeline:
    return Pipeline([jobs, Log("things", shards=1)])


@pytest.fixture
def sessions(engine: Engine, flow: Pipeline) -> sessionmaker[Session]:
    made = sessionmaker(engine)
    flow.attach(made)
    return made


Put = Callable[..., None]


@pytest.fixture
def put(sessions: sessionmaker[Session], jobs: Queue) -> Put:
    """Stages jobs with these numbers, each of its own transaction's."""

    def stage_jobs(*numbers: int, tenant: object = "a", **options: Any) -> None:
        with sessions.begin() as session:
            for number in numbers:
                stage(session, to=jobs, tenant=tenant, data={"number": number}, **JOB, **options)

    return stage_jobs


@pytest.fixture
def publish(put: Put, streamer: Streamer) -> Put:
    """Stages jobs, and has them published."""

    def publish_jobs(*numbers: int, **options: Any) -> None:
        put(*numbers, **options)
        streamer.drain()

    return publish_jobs


class Worker:
    """Reads the queue and has the effects: as a worker does, with nothing around it."""

    def __init__(self, client: RedisClient, connection: Connection) -> None:
        self.queue = FairQueue(client, NAME)
        self.reader = self.queue.reader()
        self.connection = connection
        self.effects: list[int] = []
        self.handed_over = 0

    def work(self) -> list[int]:
        """Does all that waits; returns the numbers of the jobs whose effects are new."""
        done: list[int] = []
        while leases := self.reader.read(100):
            self.handed_over += len(leases)
            for lease in leases:
                [*first] = self.connection.execute(
                    "SELECT penstock.finish_records(%s, %s)", (NAME, [int(lease.message.id)])
                )
                if first:
                    done.append(json.loads(lease.message.payload)["number"])
                lease.done()
        self.effects += done
        return sorted(done)


@pytest.fixture
def worker(redis_url: str, redis_client: redis.Redis, connection: Connection) -> Iterator[Worker]:
    client = connect_redis(redis_url)
    made = Worker(client, connection)
    yield made
    made.reader.close()
    client.close()


def outstanding(connection: Connection) -> int:
    [(count,)] = connection.execute("SELECT count(*) FROM penstock.staged_records WHERE channel = 'jobs'").fetchall()
    return int(count)


def waiting(connection: Connection, *, given: bool = False) -> int:
    [(count,)] = connection.execute(
        "SELECT count(*) FROM penstock.waiting_records WHERE is_given = %s", (given,)
    ).fetchall()
    return int(count)


def test_a_staged_job_is_done_once(put: Put, streamer: Streamer, worker: Worker, connection: Connection) -> None:
    put(*range(250))
    put(250, tenant="b", headers={"trace": "x"}, key="k")
    assert streamer.drain() == 251

    assert worker.work() == list(range(251))
    assert outstanding(connection) == 0
    assert streamer.drain() == 0
    assert worker.work() == []


@pytest.mark.parametrize("jobs", [{"streams": 8, "hand": 3}], indirect=True)
def test_a_tenants_messages_are_in_the_streams_of_its_hand(publish: Put, redis_client: RedisClient) -> None:
    publish(*range(9))

    lengths = {number: redis_client.xlen(f"penstock:{{jobs/0}}:s{number}") for number in range(8)}
    assert {number: length for number, length in lengths.items() if length} == dict.fromkeys(choose_hand("a", 8, 3), 3)


def test_what_a_redis_has_lost_is_given_again_from_the_next_write_on(
    publish: Put, put: Put, streamer: Streamer, connection: Connection, redis_client: RedisClient
) -> None:
    publish(1, delay=3 * 3600)
    connection.execute("UPDATE penstock.waiting_records SET due = due - interval '150 minutes'")
    streamer.drain()
    assert waiting(connection, given=True) == 1
    redis_client.flushall()
    put(2)
    streamer.stream()
    assert (waiting(connection, given=True), waiting(connection)) == (0, 1)
    assert streamer.maintain() == 1

    streamer.drain()
    stats = FairQueue(redis_client, NAME).stats()
    assert (stats.waiting, stats.delayed) == (1, 1)


def test_a_message_has_the_records_parts(worker: Worker, publish: Put) -> None:
    publish(1, tenant=("a", 7), headers={"big": 0.1}, key="k", deadline=FAR)

    [lease] = worker.reader.read()
    message = lease.message
    assert (message.tenant, message.key) == ('["a", 7]', "k")
    assert json.loads(message.payload) == {"number": 1}
    assert message.deadline_ms == FAR.timestamp() * 1000
    headers = json.loads(message.headers)
    own = headers.pop("penstock")
    assert headers == {"big": 0.1}
    assert (own["action"], own["object"]) == ("send", "receipt")
    assert own["staged_us"] > 0


FAR = datetime.now(UTC).replace(microsecond=0) + timedelta(days=40)


def test_a_rolled_back_job_is_not_done(
    sessions: sessionmaker[Session], jobs: Queue, streamer: Streamer, worker: Worker
) -> None:
    with sessions() as session:
        stage(session, to=jobs, tenant="a", data=1, **JOB)
        session.rollback()

    assert streamer.drain() == 0
    assert worker.work() == []


def flush(client: redis.Redis) -> None:
    client.flushall()


def delete(name: str) -> Callable[[redis.Redis], None]:
    def harm(client: redis.Redis) -> None:
        assert client.delete(f"penstock:{{jobs/0}}:{name}")

    harm.__name__ = name
    return harm


def delete_streams(client: redis.Redis) -> None:
    for number in range(16):
        client.delete(f"penstock:{{jobs/0}}:s{number}")


def delete_own(client: redis.Redis) -> None:
    client.delete(*client.keys("*:q-*"), *client.keys("*:s*"))


def settle_down(streamer: Streamer) -> None:
    for _ in range(4):
        streamer.drain()


def settle_until(streamer: Streamer, condition: Callable[[], bool]) -> None:
    """Until it has read the limits again, which is once a second."""

    def settled() -> bool:
        streamer.drain()
        return condition()

    eventually(settled, "the limits hold")


HARMS = [
    flush,
    delete_streams,
    delete_own,
    *map(delete, ["q-meta", "q-messages", "q-waiting", "q-accounts", "log", "epoch"]),
]


@pytest.mark.parametrize(
    ("harm", "is_retained"), [*((harm, True) for harm in HARMS), (flush, False), (HARMS[4], False)]
)
def test_what_redis_forgets_is_written_again_until_the_effect(
    site: Site, put: Put, worker: Worker, harm: Callable[[redis.Redis], None], publish: Put, *, is_retained: bool
) -> None:
    publish(1, 2, 3)
    assert worker.work() == [1, 2, 3]
    put(*range(10, 150))
    publish(150, due=datetime.now(UTC) + timedelta(minutes=1))
    if is_retained:
        publish(151)
        retain_now(site.streamer)

    harm(site.client)
    settle_down(site.streamer)

    expected = [*range(10, 150), *([151] if is_retained else [])]
    assert worker.work() == expected
    assert len(worker.effects) == len(expected) + 3
    assert outstanding(site.connection) == 1
    assert worker.queue.stats().delayed == 1


def test_an_older_copy_of_redis_is_brought_up(
    streamer: Streamer, worker: Worker, redis_client: redis.Redis, publish: Put
) -> None:
    publish(*range(50))
    copy: Any = {key: redis_client.dump(key) for key in redis_client.scan_iter()}
    publish(*range(50, 120))
    assert worker.work() == list(range(120))
    publish(*range(120, 130))

    redis_client.flushall()
    for key, value in copy.items():
        redis_client.restore(key, 0, value)
    settle_down(streamer)

    assert worker.work() == list(range(120, 130))
    assert sorted(worker.effects) == list(range(130))


def test_what_is_due_later_waits_in_postgres(
    put: Put, streamer: Streamer, worker: Worker, connection: Connection, publish: Put
) -> None:
    put(1, delay=3 * 3600)
    publish(2, delay=1800)
    stats = worker.queue.stats()
    assert (waiting(connection), stats.delayed, stats.waiting) == (1, 1, 0)

    connection.execute("UPDATE penstock.waiting_records SET due = due - interval '150 minutes'")
    streamer.drain()
    stats = worker.queue.stats()
    assert (waiting(connection), waiting(connection, given=True), stats.delayed) == (0, 1, 2)


LIMITS = {"a": TenantLimits(in_flight=2, weight=3), "": TenantLimits(in_flight=1)}


def hold(worker: Worker) -> dict[str, int]:
    """Takes all that may be in flight together, gives it back, and returns how many there were by tenant."""
    held: list[Lease] = []
    while leases := worker.reader.read(100):
        held += leases
    for lease in held:
        lease.release()
    return Counter(lease.message.tenant for lease in held)


def test_declared_limits_hold_from_the_first_message_and_after_redis_lost_them(
    jobs: Queue, put: Put, database_url: str, redis_url: str, redis_client: redis.Redis, worker: Worker
) -> None:
    with Streamer(Pipeline([replace(jobs, limits=LIMITS)]), database_url, redis_url) as streamer:
        put(*range(5))
        put(*range(5), tenant="b")
        streamer.drain()
        assert hold(worker) == {"a": 2, "b": 1}

        for harm in (delete("q-limits"), flush):
            harm(redis_client)
            settle_down(streamer)
            assert hold(worker) == {"a": 2, "b": 1}


def test_declared_limits_of_keys_hold_likewise(
    jobs: Queue, put: Put, database_url: str, redis_url: str, redis_client: redis.Redis, worker: Worker
) -> None:
    flow = Pipeline([replace(jobs, key_limits={"": KeyLimits(in_flight=1)})])
    with Streamer(flow, database_url, redis_url) as streamer:
        put(*range(5), key="k")
        put(*range(5), key="k", tenant="b")
        put(*range(2), key="other")
        streamer.drain()
        assert len(worker.reader.read(100)) == 2  # of a worker that died

        for harm in (delete("q-limits"), delete("q-gates"), flush):
            harm(redis_client)
            settle_down(streamer)
            assert sum(hold(worker).values()) == (0 if harm is not flush else 2)


def test_names_that_sql_made_up_with_a_separator_stop_no_queue_that_limits_keys(
    jobs: Queue, put: Put, connection: Connection, database_url: str, redis_url: str, worker: Worker
) -> None:
    put(*range(3), key="k")
    for tenant, key in (("a", "k\1"), ("a", "\1"), ("\1k", "x")):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers) "
            "VALUES ('jobs', 0, %s, 'queued', 'message', '1', %s)",
            (tenant, json.dumps({"penstock": {"key": key}})),
        )
    flow = Pipeline([replace(jobs, key_limits={"": KeyLimits(in_flight=1)})])
    with Streamer(flow, database_url, redis_url) as streamer:
        settle_down(streamer)
        [first] = worker.reader.read(1)
        first.done()
        assert sum(hold(worker).values()) == 4


def test_what_an_operator_sets_comes_before_declared_limits(
    jobs: Queue, put: Put, database_url: str, redis_url: str, worker: Worker
) -> None:
    flow = Pipeline([replace(jobs, limits=LIMITS)])
    with Streamer(flow, database_url, redis_url) as streamer:
        put(*range(5))
        put(*range(5), tenant="b")
        worker.queue.limit("a", TenantLimits(in_flight=3))
        worker.queue.limit_all(TenantLimits(in_flight=4))
        streamer.drain()
        assert hold(worker) == {"a": 3, "b": 4}

        worker.queue.limit("a", None)
        worker.queue.limit_all(None)
        assert hold(worker) == {"a": 2, "b": 1}


def test_limits_that_the_application_sets_come_before_declared_ones_and_outlive_redis(
    site: Site, jobs: Queue, put: Put, sessions: sessionmaker[Session], worker: Worker
) -> None:
    """Set through a session and through a driver's connection; taken back, the declared ones hold."""
    declared = replace(jobs, limits=LIMITS)
    flow = Pipeline([declared])
    put(*range(5), key="k")
    put(*range(5), tenant="b")
    with sessions.begin() as session:
        limit(session, TenantLimits(in_flight=4), of=jobs, tenant="a")
        limit(session, KeyLimits(in_flight=3), of=jobs, key="k")
        limit(session, KeyLimits(in_flight=9), of=jobs, key="a")
    with sessions() as session:
        limit(session, TenantLimits(is_paused=True), of=jobs, tenant="")  # rolled back
    with Streamer(flow, site.database_url, site.redis_url) as streamer:
        for harm in (settle_down, lambda _: flush(site.client)):
            harm(streamer)
            settle_down(streamer)
            assert hold(worker) == {"a": 3, "b": 1}
        limit(site.connection, None, of=declared, tenant="a", pipeline=flow)
        limit(site.connection, None, of=declared, key="k", pipeline=flow)
    assert site.connection.execute("SELECT kind, name FROM penstock.queue_limits").fetchall() == [("key", "a")]
    with Streamer(flow, site.database_url, site.redis_url) as streamer:
        settle_down(streamer)
        assert hold(worker) == {"a": 2, "b": 1}


def test_a_limit_that_is_committed_after_a_later_one_holds(
    jobs: Queue, put: Put, sessions: sessionmaker[Session], database_url: str, redis_url: str, worker: Worker
) -> None:
    """Limits are read again if any has changed, whatever the order of commits."""
    put(*range(5))
    put(*range(5), tenant="b")
    with sessions.begin() as session:
        for tenant in "ab":
            limit(session, TenantLimits(in_flight=4), of=jobs, tenant=tenant)
    with Streamer(Pipeline([jobs]), database_url, redis_url) as streamer, sessions() as earlier:
        limit(earlier, TenantLimits(in_flight=2), of=jobs, tenant="a")
        with sessions.begin() as later:
            limit(later, TenantLimits(in_flight=1), of=jobs, tenant="b")
        settle_until(streamer, lambda: hold(worker) == {"a": 4, "b": 1})
        earlier.commit()
        settle_until(streamer, lambda: hold(worker) == {"a": 2, "b": 1})


def test_limits_of_something_else_are_refused(jobs: Queue, connection: Connection, flow: Pipeline) -> None:
    for limits, names in ((KeyLimits(), {"tenant": "a"}), (TenantLimits(), {"key": "k"}), (None, {})):
        with pytest.raises(InvalidMessage):
            limit(connection, limits, of=jobs, pipeline=flow, **names)


def test_a_limit_of_a_key_over_shards_that_know_only_their_own_is_refused_but_a_pause_is_not(
    jobs: Queue, connection: Connection
) -> None:
    sharded, apart = replace(jobs, shards=2), replace(jobs, shards=2, keys_within="tenant")
    with pytest.raises(InvalidMessage, match=r"its 2 shards counts only its own jobs: .*keys_within='tenant'"):
        limit(connection, KeyLimits(rate=1), of=sharded, key="k", pipeline=Pipeline([sharded]))
    limit(connection, KeyLimits(is_paused=True), of=sharded, key="k", pipeline=Pipeline([sharded]))
    limit(connection, KeyLimits(rate=1), of=apart, key="k", pipeline=Pipeline([apart]))


def test_invalid_rows_of_queue_limits_are_ignored_and_unknown_fields_are_allowed(
    jobs: Queue, put: Put, connection: Connection, database_url: str, redis_url: str, worker: Worker
) -> None:
    rows = {
        "a": '{"in_flight": 2, "colour": 3}',
        "b": '{"in_flight": 0}',
        "c": '["x"]',
        "d": '"x"',
        "e": '{"is_paused": "no"}',
        "\1\1": "{}",
    }
    for name, limits in rows.items():
        connection.execute("INSERT INTO penstock.queue_limits VALUES ('jobs', 'tenant', %s, %s)", (name, limits))
    for tenant in "abcde":
        put(*range(3), tenant=tenant)
    with Streamer(Pipeline([jobs]), database_url, redis_url) as streamer:
        settle_down(streamer)

    assert hold(worker) == {"a": 2, "b": 3, "c": 3, "d": 3, "e": 3}


def test_limits_that_are_declared_no_more_end_and_do_not_come_back_with_an_older_redis(
    jobs: Queue, put: Put, database_url: str, redis_url: str, redis_client: redis.Redis, worker: Worker
) -> None:
    put(*range(5))
    for limits, expected in ((LIMITS, 2), ({"": TenantLimits(in_flight=1)}, 1), ({}, 5)):
        flow = Pipeline([replace(jobs, limits=limits)])
        before = redis_client.dump("penstock:{jobs/0}:q-limits")
        with Streamer(flow, database_url, redis_url) as streamer:
            streamer.drain()
            assert hold(worker) == {"a": expected}
            if before:
                redis_client.restore("penstock:{jobs/0}:q-limits", 0, before, replace=True)
                settle_down(streamer)
                assert hold(worker) == {"a": expected}


@pytest.mark.parametrize("is_far", [False, True])
def test_jobs_that_are_due_together_come_in_the_order_of_staging(
    streamer: Streamer, worker: Worker, redis_client: redis.Redis, connection: Connection, publish: Put, *, is_far: bool
) -> None:
    """Also if half of them were given to Redis last, because they waited in Postgres."""
    due = datetime.now(UTC) + timedelta(minutes=90 if is_far else 5)
    publish(*range(120), due=due)
    connection.execute("UPDATE penstock.waiting_records SET due = now() WHERE record_id % 2 = 0")
    streamer.drain()
    connection.execute("UPDATE penstock.waiting_records SET due = now()")
    streamer.drain()
    redis_client.hincrbyfloat("penstock:{jobs/0}:q-meta", "clock", 2 * 3_600_000)

    order = [json.loads(lease.message.payload)["number"] for lease in worker.reader.read(100)]
    assert order == list(range(100))


def test_a_full_tenant_waits_in_postgres_and_stops_nobody(
    put: Put, streamer: Streamer, worker: Worker, connection: Connection, publish: Put
) -> None:
    worker.queue.limit("a", TenantLimits(bytes=40))
    put(*range(10))
    publish(*range(10, 20), tenant="b")
    assert waiting(connection) == 7

    done = worker.work()
    assert done == [0, 1, 2, *range(10, 20)]

    def all_are_done() -> bool:
        streamer.drain()
        done.extend(worker.work())
        return sorted(done) == list(range(20))

    eventually(all_are_done, "all are done")
    streamer.drain()
    assert waiting(connection) == 0


def test_a_full_tenant_with_many_does_not_hold_up_what_is_due(streamer: Streamer, worker: Worker, publish: Put) -> None:
    worker.queue.limit("a", TenantLimits(bytes=10))
    publish(*range(1000))
    publish(1000, tenant="b", delay=2 * 3600)
    worker.connection.execute("UPDATE penstock.waiting_records SET due = now() WHERE tenant IS NULL")
    streamer.drain()

    assert worker.queue.stats().delayed == 1


def test_a_duplicate_is_finished_with_no_effect_of_its_own(
    put: Put, worker: Worker, connection: Connection, publish: Put
) -> None:
    put(1, unique=Unique("x"))
    publish(2, unique=Unique("x"))

    assert outstanding(connection) == 1
    assert worker.work() == [1]
    publish(3, unique=Unique("x"))
    assert worker.work() == [3]


def test_a_duplicate_of_a_job_whose_effect_is_there_is_not_dropped(
    streamer: Streamer, worker: Worker, connection: Connection, publish: Put
) -> None:
    """Its holder was done before it was staged: only Redis does not know yet."""
    publish(1, unique=Unique("x"))
    [lease] = worker.reader.read()
    connection.execute("SELECT penstock.finish_records('jobs', %s)", ([int(lease.message.id)],))
    publish(2, unique=Unique("x"))
    assert waiting(connection) == 1
    lease.done()
    connection.execute("UPDATE penstock.waiting_records SET due = now()")
    streamer.drain()

    assert worker.work() == [2]


def give_out_again(connection: Connection, id_: int) -> None:
    """As a restored Postgres does: the record is gone, and another one has its id."""
    connection.execute("DELETE FROM penstock.staged_records WHERE id = %s", (id_,))
    connection.execute(
        "INSERT INTO penstock.staged_records (id, channel, shard, key, action, object, data) "
        "OVERRIDING SYSTEM VALUE VALUES (%s, 'jobs', 0, 'a', 'send', 'receipt', '{}')",
        (id_,),
    )


def test_a_holder_whose_id_was_given_out_again_holds_nothing(connection: Connection, publish: Put) -> None:
    publish(1, unique=Unique("x"))
    give_out_again(connection, 1)
    publish(2, unique=Unique("x"))

    assert outstanding(connection) == 2


def test_a_duplicate_whose_id_was_given_out_again_is_another_record(
    put: Put, streamer: Streamer, connection: Connection, publish: Put
) -> None:
    """The streamer has read it, and Postgres is put back, behind a pooler, before Redis says that it is a duplicate."""
    publish(1, unique=Unique("x"))
    put(2, unique=Unique("x"))

    def strike(point: str) -> None:
        if point == "queues.after_write":
            install_crashpoint(None)
            give_out_again(connection, 2)

    install_crashpoint(strike)
    streamer.drain()

    assert outstanding(connection) == 2


@pytest.mark.slow
def test_two_streamers_write_each_message_once(
    put: Put, flow: Pipeline, streamer: Streamer, worker: Worker, database_url: str, redis_url: str
) -> None:
    with Streamer(flow, database_url, redis_url) as other:
        for start in range(0, 400, 100):
            put(*range(start, start + 100))
            other.round()
            streamer.round()
        settle_down(streamer)
        settle_down(other)

    assert worker.work() == list(range(400))
    assert worker.handed_over == 400


def test_a_batch_takes_few_round_trips(
    sessions: sessionmaker[Session], jobs: Queue, streamer: Streamer, redis_client: redis.Redis
) -> None:
    streamer.drain()
    made: Any = [{"tenant": n % 7, "data": n, "key": n, **JOB} for n in range(1000)]
    with sessions.begin() as session:
        stage_many(session, to=jobs, records=made)
    before = calls(redis_client)
    assert streamer.drain() == 1000

    assert calls(redis_client) - before < 30


def calls(client: redis.Redis) -> int:
    stats: Any = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))


def test_a_foreign_key_stops_this_queue_alone(
    put: Put, streamer: Streamer, redis_client: redis.Redis, connection: Connection, worker: Worker, publish: Put
) -> None:
    publish(1)
    redis_client.rename("penstock:{jobs/0}:q-messages", "kept")
    redis_client.set("penstock:{jobs/0}:q-messages", "somebody's")
    put(2)
    connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "VALUES ('things', 0, 'k', 'insert', 'thing', '{}')"
    )
    for _ in range(3):
        streamer.round()
    assert redis_client.xlen("penstock:{things/0}:log") == 1

    redis_client.rename("kept", "penstock:{jobs/0}:q-messages")
    settle_down(streamer)
    assert worker.work() == [1, 2]


def test_a_header_that_somebody_else_wrote_stops_nothing(
    streamer: Streamer, worker: Worker, connection: Connection
) -> None:
    headers: Sequence[str] = [
        '{"penstock": 5}',
        '{"penstock": {"due": "soon", "key": 7, "unique": []}}',
        '{"penstock": {"due": 1e300, "deadline": -1, "unique": {"name": "n", "until": 3}}}',
        '{"penstock": {"unique": {"name": "m", "until": []}}}',
        '{"penstock": {"due": 1e400}}',
        f'{{"penstock": {{}}, "deep": {"[" * 5000}{"]" * 5000}}}',
        f'{{"penstock": {{"due": {"9" * 5000}}}}}',
        '[1, "penstock"]',
        '"penstock"',
    ]
    for number, text in enumerate(headers):
        connection.execute(
            "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers) "
            "VALUES ('jobs', 0, 'a', 'send', 'receipt', %s, %s)",
            (json.dumps({"number": number}), text),
        )
    streamer.drain()

    assert worker.work() == [*range(len(headers))]


@pytest.mark.parametrize("passing", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "point", ["publisher.before_append", "publisher.after_append", *QUEUE_CRASH_POINTS, "retention.before_commit"]
)
def test_a_kill_between_two_steps_loses_nothing_and_doubles_nothing(
    site: Site, put: Put, worker: Worker, point: str, passing: int
) -> None:
    passings = count(1)

    def strike(name: str) -> None:
        if name == point and next(passings) == passing:
            raise Killed

    def stream() -> None:
        with Streamer(site.flow, site.database_url, site.redis_url) as streamer:
            settle_down(streamer)
            retain_now(streamer)
            site.connection.execute("UPDATE penstock.waiting_records SET due = now()")
            settle_down(streamer)

    worker.queue.limit("full", TenantLimits(bytes=40))
    with at_crash_points(strike):
        for start in range(0, 40, 20):
            put(*range(start, start + 5))
            put(*range(start + 5, start + 10), tenant="full")
            put(start + 10, delay=7200)
            put(start + 11, unique=Unique("x"))
            try:
                stream()
            except Killed:
                stream()
            worker.work()
    for _ in range(3):
        stream()
        worker.work()

    expected = {n for n in range(40) if n % 20 < 10 or n % 20 == 11}
    assert sorted(worker.effects) == sorted(expected)
    assert outstanding(site.connection) == worker.queue.stats().delayed == 2


def test_a_streamer_of_an_older_epoch_writes_nothing(
    put: Put, streamer: Streamer, redis_client: redis.Redis, connection: Connection, worker: Worker, publish: Put
) -> None:
    publish(1, delay=7200)
    redis_client.set("penstock:{jobs/0}:epoch", 2)
    connection.execute("UPDATE penstock.waiting_records SET due = now()")
    with pytest.raises(Fenced):
        streamer.opened().publisher.maintain_queues()
    put(2)
    with pytest.raises((Fenced, HistoryDiverged)):
        streamer.drain()

    assert worker.queue.stats().length == 0


def test_a_queue_none_of_whose_streams_can_be_written_stops_alone_and_recovers(
    put: Put, streamer: Streamer, redis_client: redis.Redis, worker: Worker
) -> None:
    for number in range(16):
        redis_client.set(f"penstock:{{jobs/0}}:s{number}", "somebody's")
    put(1)
    streamer.round()
    [error] = streamer.opened().publisher.unusable.errors.values()
    assert isinstance(error, QueueDamaged)

    for number in range(16):
        redis_client.delete(f"penstock:{{jobs/0}}:s{number}")
    settle_down(streamer)
    assert worker.work() == [1]


def test_the_number_of_streams_may_change_between_two_releases(
    put: Put, worker: Worker, database_url: str, redis_url: str, publish: Put
) -> None:
    publish(*range(30))
    for number, streams in enumerate([3, 40], 1):
        with Streamer(
            Pipeline([Queue(NAME, streams=streams), Log("things", shards=1)]), database_url, redis_url
        ) as other:
            put(*range(30 * number, 30 * number + 30))
            other.drain()

    assert worker.queue.stats().streams == 40
    assert worker.work() == list(range(90))


def test_retention_keeps_what_is_not_done(
    streamer: Streamer, connection: Connection, worker: Worker, publish: Put
) -> None:
    publish(*range(20))
    publish(20)
    retain_now(streamer)

    [(journaled,)] = connection.execute("SELECT sum(cardinality(record_ids)) FROM penstock.journal").fetchall()
    assert journaled < 21
    assert outstanding(connection) == 21
    assert missed_records(Store(connection)) == []
    assert worker.work() == list(range(21))
    settle_down(streamer)
    assert waiting(connection, given=True) == 0


def test_what_is_due_is_found_by_its_index_however_much_waits(connection: Connection) -> None:
    connection.execute(
        "INSERT INTO penstock.waiting_records (record_id, channel, shard, due) "
        "SELECT i, 'jobs', 0, now() + i * interval '1 hour' FROM generate_series(1, 20000) i"
    )
    sql = statements("penstock")["due_records"]
    values = {"channel": "jobs", "shard": 0, "records": 100, "bytes": 1000}
    plan = connection.execute(b"EXPLAIN " + sql, values).fetchall()

    assert any("Index Cond" in line and "due <= " in line for (line,) in plan)


def test_large_records_that_wait_are_fed_in_small_batches(
    put: Put, streamer: Streamer, worker: Worker, set_constants: SetConstants
) -> None:
    worker.queue.limit("a", TenantLimits(bytes=1))
    put(*range(30))
    put(*range(30, 60), delay=7200, tenant="b")
    set_constants("streaming.unpublished", BATCH_BYTES=1)
    streamer.drain()
    worker.queue.limit("a", None)
    worker.connection.execute("UPDATE penstock.waiting_records SET due = now() WHERE tenant IS NULL")

    def all_are_fed() -> bool:
        streamer.drain()
        return (worker.queue.stats().delayed, worker.queue.stats().waiting) == (30, 30)

    eventually(all_are_fed, "all are fed")


@pytest.mark.parametrize("within", ["queue", "tenant"])
def test_a_name_held_for_a_window_is_held_though_redis_has_lost_it(
    site: Site, within: Any, put: Put, worker: Worker, publish: Put
) -> None:
    """Guarantee 46: the first is done before the loss, and one that is due later comes again after it."""
    put(1, unique=Unique("x", window=600, within=within))
    publish(2, unique=Unique("y", window=600, within=within))
    done, _ = worker.reader.read(2)
    site.connection.execute("SELECT penstock.finish_records('jobs', %s)", ([int(done.message.id)],))
    flush(site.client)
    put(3, unique=Unique("x", window=600, within=within))
    put(4, unique=Unique("z", window=600, within=within))
    put(5, tenant="b", unique=Unique("x", window=600, within=within))
    settle_down(site.streamer)

    assert worker.work() == [2, 4, *([5] if within == "tenant" else [])]
    site.connection.execute("UPDATE penstock.unique_names SET ends = now()")
    flush(site.client)
    put(6, unique=Unique("x", window=600, within=within))
    settle_down(site.streamer)
    assert worker.work() == [6]


def test_a_name_held_for_a_window_drops_what_comes_in_it_though_the_first_is_done(
    put: Put, streamer: Streamer, worker: Worker, connection: Connection, publish: Put
) -> None:
    publish(1, unique=Unique("x", window=60))
    assert worker.work() == [1]
    put(2, unique=Unique("x", window=60))
    settle_down(streamer)

    assert outstanding(connection) == 0
    assert worker.work() == []


class Divided:
    """A queue of eight shards, its streamer, and what its workers have done."""

    def __init__(self, engine: Engine, database_url: str, redis_url: str) -> None:
        self.queue = Queue(NAME, shards=8, streams=2, keep=timedelta(0))
        flow = Pipeline([self.queue])
        self.sessions = sessionmaker(engine)
        flow.attach(self.sessions)
        self.streamer = Streamer(flow, database_url, redis_url)

    def put(self, tenants: range, unique: Unique) -> None:
        """Stages a job for each tenant; these are in all shards."""
        with self.sessions.begin() as session:
            for tenant in tenants:
                stage(session, to=self.queue, tenant=tenant, data=tenant, unique=unique, **JOB)

    def read(self, client: RedisClient) -> list[Lease]:
        return FairQueue(client, NAME, shards=8, streams=2).reader().read(100)

    def finish(self, connection: Connection, lease: Lease) -> None:
        connection.execute("SELECT penstock.finish_records(%s, %s)", (NAME, [int(lease.message.id)]))
        lease.done()


@pytest.fixture
def divided(engine: Engine, database_url: str, redis_url: str) -> Iterator[Divided]:
    made = Divided(engine, database_url, redis_url)
    yield made
    made.streamer.close()


def names(connection: Connection) -> int:
    [(count,)] = connection.execute("SELECT count(*) FROM penstock.unique_names").fetchall()
    return int(count)


@pytest.mark.parametrize("until", ["running", "queued"])
def test_a_unique_name_is_one_in_all_shards(
    divided: Divided, redis_client: redis.Redis, connection: Connection, until: Any
) -> None:
    unique = Unique("invoice-17", until)
    divided.put(range(40), unique)
    shards: dict[int, int] = dict(connection.execute("SELECT data::int, shard FROM penstock.staged_records").fetchall())
    divided.streamer.drain()
    assert outstanding(connection) == 1
    redis_client.flushall()  # nothing is known of it there
    settle_down(divided.streamer)
    divided.put(range(40), unique)
    divided.streamer.drain()
    assert outstanding(connection) == 1

    [lease] = divided.read(redis_client)
    other = next(tenant for tenant in shards if shards[tenant] != shards[int(lease.message.tenant)])
    divided.put(range(other, other + 1), unique)  # only the other shard knows what became of it
    divided.streamer.drain()
    assert outstanding(connection) == (1 if until == "running" else 2)

    divided.finish(connection, lease)
    divided.put(range(40), unique)
    divided.streamer.drain()
    assert outstanding(connection) == 1


def test_a_window_is_one_in_all_shards_whatever_becomes_of_the_job(
    divided: Divided, redis_client: redis.Redis, connection: Connection
) -> None:
    unique = Unique("invoice-17", window=60.0)
    divided.put(range(40), unique)
    divided.streamer.drain()
    [lease] = divided.read(redis_client)
    divided.finish(connection, lease)
    divided.put(range(40), unique)
    divided.streamer.drain()
    assert outstanding(connection) == 0

    connection.execute("UPDATE penstock.unique_names SET ends = now()")
    redis_client.flushall()
    divided.put(range(40), unique)
    settle_down(divided.streamer)
    assert outstanding(connection) == 1


@pytest.mark.slow
def test_two_streamers_give_a_name_once(
    divided: Divided, database_url: str, redis_url: str, connection: Connection
) -> None:
    with Streamer(Pipeline([divided.queue]), database_url, redis_url) as other:
        for number in range(10):
            divided.put(range(20), Unique(f"n{number % 3}"))
            divided.streamer.round()
            other.round()
        settle_down(divided.streamer)
        settle_down(other)

    assert outstanding(connection) == 3


def test_a_name_within_a_tenant_is_one_for_each(
    divided: Divided, redis_client: redis.Redis, connection: Connection
) -> None:
    for _ in range(2):
        divided.put(range(40), Unique("invoice-17", within="tenant"))
    divided.streamer.drain()

    assert outstanding(connection) == 40
    assert len(divided.read(redis_client)) == 40
    assert names(connection) == 0


def test_names_of_jobs_that_are_done_are_forgotten(
    divided: Divided, redis_client: redis.Redis, connection: Connection, set_constants: SetConstants
) -> None:
    """Behind a page of names that are held, too."""
    set_constants("streaming.queues", RECONCILE_RECORDS=2)
    for number in range(20):
        divided.put(range(2), Unique(f"n{number}"))
    divided.streamer.drain()
    assert names(connection) == 20

    for lease in divided.read(redis_client):
        divided.finish(connection, lease)
    for name in ("a", "b"):
        divided.put(range(1), Unique(name))
    for _ in range(50):  # a round looks after as many shards as it has time for
        divided.streamer.drain()
        if names(connection) == 2:
            break
    assert names(connection) == 2
