"""Groups of jobs: what follows a group is staged exactly once, when none of its members is left."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from fixtures.constants import SetConstants
from fixtures.flow import running
from fixtures.jobs import JOBS, Bench
from penstock import Cancel, Job, Log, Pipeline, Queue, Staging, find_group, find_group_async, stage_many
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.errors import InvalidRecord, ServerUnavailable, StagingError
from penstock.operating.channels import retire_channel
from penstock.staging.job_reports import _GROUP
from penstock.streaming import Streamer
from penstock.streaming.scheduler import JobGroups
from penstock.testing import drained, eventually

REPORTS = Queue("reports")


def make_members(*data: Any) -> list[Staging]:
    return [{"action": "send", "object": "receipt", "data": each, "tenant": "t"} for each in data]


@pytest.fixture
def working() -> Pipeline:
    return Pipeline([JOBS, REPORTS])


@pytest.fixture
def receipts(working: Pipeline) -> Any:
    @working.worker(reads=JOBS, attempts=1)
    def receipts(_: Session, job: Job) -> Cancel | None:
        if job.data == "fails":
            raise ValueError
        job.set_result({"sent": job.data})
        return Cancel() if job.data == "cancelled" else None

    return receipts


@pytest.fixture
def report(working: Pipeline) -> Any:
    @working.worker(reads=REPORTS)
    def report(session: Session, job: Job) -> None:
        found = find_group(session, job.headers["group"], with_results=True)
        assert found is not None
        job.set_result([job.data, found.remaining, found.dead, sorted(each["sent"] for each in found.results.values())])

    return report


def test_what_follows_a_group_is_done_once_when_all_members_are_done_cancelled_or_dead(
    working: Pipeline,
    receipts: Any,
    report: Any,
    sessions: sessionmaker[Session],
    bench: Bench,
    database_url: str,
    redis_url: str,
) -> None:
    members = ["a", "fails", "cancelled", "b"]
    then = report.job("report", tenant="t", headers={"group": "of the application"})
    with sessions.begin() as session:
        receipts.stage_many(session, members, tenant="t", group="import-17", then=then)
        during = find_group(session, "import-17")
    assert during is not None
    assert (len(during.ids), during.remaining, during.ended_at) == (4, 4, None)

    applied = drained(working, database_url, redis_url, allow_dead_letters=True)

    assert applied["report"] == 1
    with sessions() as session:
        after = find_group(session, "import-17")
        assert find_group(session, "import-18") is None
    assert after is not None
    assert (after.ids, after.remaining, after.dead, after.results) == (during.ids, 0, 1, {})
    assert after.ended_at is not None
    assert bench.rows("SELECT result FROM penstock.job_results WHERE channel = 'reports'") == [
        (["report", 0, 1, ["a", "b"]],)
    ]


def test_a_member_whose_end_is_not_committed_is_left(
    working: Pipeline, report: Any, sessions: sessionmaker[Session], bench: Bench, database_url: str
) -> None:
    with sessions.begin() as session:
        stage_many(session, make_members(1, 2), to=JOBS, then=report.job("", tenant="t"))
    groups, finish = JobGroups(working), b"SELECT penstock.finish_records('jobs', ARRAY[%s]::bigint[])"
    last, first = sorted(bench.unfinished, reverse=True)
    bench.connection.execute(finish, [last])  # at which the group looks first
    with connect_postgres(database_url, application="worker") as worker, worker.transaction() as transaction:
        worker.execute(finish, [first])
        assert groups.stage_following(Store(bench.connection)) == 0
        raise psycopg.Rollback(transaction)
    assert groups.stage_following(Store(bench.connection)) == 0
    bench.connection.execute(finish, [first])
    assert [groups.stage_following(Store(bench.connection)) for _ in range(2)] == [1, 0]
    [(channel, headers)] = bench.rows("SELECT channel, headers FROM penstock.staged_records")
    assert (channel, len(headers["group"])) == ("reports", 32)


def test_a_group_that_cannot_be_ended_holds_up_no_other(
    working: Pipeline, report: Any, sessions: sessionmaker[Session], bench: Bench
) -> None:
    add = "INSERT INTO penstock.job_groups (name, channel, members, waits_for, following) VALUES (%s, 'jobs', '{}', 0, %s)"
    bench.connection.execute(add.encode(), ["bad", '["jobs", 0]'])
    with sessions.begin() as session:
        stage_many(session, [], to=JOBS, group="good", then=report.job("", tenant="t"))
    groups = JobGroups(working)
    assert [groups.stage_following(Store(bench.connection)) for _ in range(2)] == [1, 0]
    bench.connection.execute(b"UPDATE penstock.job_groups SET following = NULL WHERE name = 'bad'")
    assert groups.stage_following(Store(bench.connection)) == 1


class Race:
    """Workers that end members, streamers that end groups, and one who ends their sessions."""

    def __init__(self, pipeline: Pipeline, database_url: str, members: list[int]) -> None:
        self._pipeline, self._url, self._left = pipeline, database_url, members

    def work(self, stop: Callable[[], bool]) -> None:
        with connect_postgres(self._url, application="worker") as connection:
            while self._left and not stop():
                with suppress(IndexError):
                    connection.execute("SELECT penstock.finish_records('jobs', %s)", [[self._left.pop()]])

    def follow(self, stop: Callable[[], bool]) -> None:
        groups = JobGroups(self._pipeline)
        while not stop():
            with suppress(ServerUnavailable), connect_postgres(self._url, application="follower") as connection:
                while not stop():
                    groups.stage_following(Store(connection))

    def kill(self, stop: Callable[[], bool]) -> None:
        one = b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '%follower%' AND datname = current_database() LIMIT 1"
        with connect_postgres(self._url, application="killer") as connection:
            while not stop():
                connection.execute(one)


def test_each_group_is_followed_once_though_streamers_compete_and_die(
    working: Pipeline, report: Any, sessions: sessionmaker[Session], bench: Bench, database_url: str
) -> None:
    with sessions.begin() as session:
        for number in range(100):
            stage_many(session, make_members(*range(5)), to=JOBS, group=str(number), then=report.job("", tenant="t"))
    race = Race(working, database_url, bench.unfinished)
    count = "SELECT count(*) FROM penstock.job_groups WHERE ended_at IS NULL"
    with running(race.work, race.work, race.follow, race.follow, race.follow, race.kill):
        eventually(lambda: bench.rows(count) == [(0,)], "all groups have ended", timeout_s=60)
    followed = Counter(name for (name,) in bench.rows("SELECT headers ->> 'group' FROM penstock.staged_records"))
    assert followed == {str(number): 1 for number in range(100)}


def test_groups_are_removed_with_the_last_queue(
    working: Pipeline, report: Any, sessions: sessionmaker[Session], bench: Bench, database_url: str, redis_url: str
) -> None:
    with Streamer(working, database_url, redis_url), sessions.begin() as session:
        stage_many(session, make_members(1), to=JOBS, group="g", then=report.job("", tenant="t"))
    left = []
    for name in ("jobs", "reports"):
        retire_channel(Store(bench.connection), bench.client, name, discard=True, apply=True, pause=lambda _: None)
        left.append(bench.rows("SELECT name FROM penstock.job_groups"))
    assert left == [[("g",)], []]


def test_an_empty_group_has_ended_and_one_that_is_rolled_back_was_never_there(
    working: Pipeline, receipts: Any, report: Any, sessions: sessionmaker[Session], bench: Bench
) -> None:
    with sessions.begin() as session:
        stage_many(session, [], to=JOBS, then=report.job("", tenant="t"))
    with sessions() as session:
        stage_many(session, make_members(1), to=JOBS, group="gone", then=report.job("", tenant="t"))
    with bench.connection.transaction():  # without anything to follow, through a connection of psycopg
        assert len(receipts.stage_many(bench.connection, [1, 2], tenant="t", group="plain")) == 2
    assert JobGroups(working).stage_following(Store(bench.connection)) == 1
    plain = find_group(bench.connection, "plain")
    assert plain is not None
    assert plain.remaining == 2
    assert find_group(bench.connection, "gone") is None


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "psycopg itself"])
def test_a_group_is_staged_and_read_by_asyncio(
    driver: str, receipts: Any, report: Any, bench: Bench, database_url: str
) -> None:
    then = report.job("", tenant="t")

    async def stage_in(target: Any) -> None:
        assert len(await receipts.stage_many_async(target, [1, 2], tenant="t", group="g", then=then)) == 2

    async def stage() -> None:
        if driver == "psycopg itself":
            async with await psycopg.AsyncConnection.connect(database_url) as connection:
                await stage_in(connection)
            return
        engine = create_async_engine(database_url.replace("postgresql:", f"postgresql+{driver}:", 1))
        async with AsyncSession(engine) as session, session.begin():
            await stage_in(session)
            found = await find_group_async(session, "g")
            assert found is not None
            assert found.remaining == 2
        await engine.dispose()

    asyncio.run(stage())
    found = find_group(bench.connection, "g")
    assert found is not None
    assert [*found.ids] == bench.unfinished


LOG = Log("rides")


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (lambda s, _: stage_many(s, [], to=LOG, group="g"), "group: is for queues, and channel rides is a log"),
        (lambda s, r: stage_many(s, make_members(*range(3)), to=JOBS, then=r), "records: are 3 jobs; a group takes 2"),
        (lambda s, _: stage_many(s, [], to=JOBS, group=""), "group: has 0 characters"),
    ],
)
def test_what_cannot_be_a_group_is_refused(
    report: Any,
    sessions: sessionmaker[Session],
    set_constants: SetConstants,
    stage: Callable[[Session, Any], int],
    message: str,
) -> None:
    set_constants("staging.explicit", MAX_MEMBERS=2)
    with sessions() as session, pytest.raises(InvalidRecord, match=message):
        stage(session, report.job("", tenant="t"))


def test_groups_are_ended_for_a_while_and_the_others_later(
    working: Pipeline,
    sessions: sessionmaker[Session],
    bench: Bench,
    set_constants: SetConstants,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records wait for the streamer's thread meanwhile."""
    set_constants("streaming.scheduler", MAX_ENDED=2)
    monkeypatch.setattr("penstock.streaming.scheduler.monotonic", count().__next__)
    set_constants("streaming.scheduler", GROUPS_S=3)
    with sessions.begin() as session:
        for number in range(7):
            stage_many(session, [], to=JOBS, group=str(number))
    groups = JobGroups(working)
    assert [groups.stage_following(Store(bench.connection)) for _ in range(3)] == [4, 3, 0]


def test_dead_letters_of_others_are_not_compared_with_each_member(
    sessions: sessionmaker[Session], bench: Bench
) -> None:
    """A request that reads a large group would wait for seconds."""
    with sessions.begin() as session:
        stage_many(session, make_members(*range(10)), to=JOBS, group="g")
    bench.connection.execute(
        'INSERT INTO penstock.dead_letters (consumer, channel, shard, "offset", record_id, key, action, object, data, '
        "staged_at, reason, attempts) "
        "SELECT 'receipts', 'jobs', 0, i, 1000 + i, 'k', 'send', 'receipt', '1', now(), '', 1 FROM generate_series(1, 500) i"
    )
    found = find_group(bench.connection, "g")
    assert found is not None
    assert found.dead == 0
    query = _GROUP.format(schema="penstock", wanted="'g'", with_results="false")
    plan = "".join(line for (line,) in bench.rows(f"EXPLAIN ANALYZE {query}"))
    assert "Removed by" not in plan


def test_a_name_is_one_groups_at_a_time(sessions: sessionmaker[Session], bench: Bench) -> None:
    with sessions.begin() as session:
        stage_many(session, make_members(1), to=JOBS, group="g")
    with sessions() as session, pytest.raises(StagingError, match="another group has this name"):
        stage_many(session, make_members(1), to=JOBS, group="g")
    assert len(bench.unfinished) == 1
