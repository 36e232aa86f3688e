"""The jobs of a queue are listed and shown by what they wait for, wherever they are."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby, product
from typing import Any

import pytest

from fixtures.command_line import CommandLine
from penstock import Pipeline, Queue, limit
from penstock.channels.commands import RedisClient
from penstock.clients import FairQueue
from penstock.database.connections import Connection
from penstock.database.registry import register_channel
from penstock.database.statements import statements
from penstock.database.store import Store
from penstock.declaring.unique import KeyLimits, TenantLimits
from penstock.errors import InvalidName, Unknown
from penstock.operating.jobs.browsing import JobFilter, find_jobs, list_jobs, parse_filter
from penstock.operating.jobs.changes import Cancellation, cancel_jobs, count_jobs, jobs_command, move_due, retry_jobs
from penstock.operating.jobs.queue_limits import list_limits
from penstock.operating.pausing import list_actions
from penstock.streaming import Streamer
from penstock.testing import eventually

pytestmark = pytest.mark.channels(Queue("jobs", keep=timedelta(0)))

STAGE = """
INSERT INTO penstock.staged_records (channel, shard, key, action, object, data, headers)
SELECT 'jobs', 0, %s, 'send', 'receipt', '{"fare": 12}', %s::jsonb
FROM generate_series(1, %s)
"""


def stage(connection: Connection, tenant: str = "a", count: int = 1, own: str = "{}") -> None:
    connection.execute(STAGE, (tenant, f'{{"penstock": {own}}}', count))


def test_jobs_are_listed_wherever_they_are(
    connection: Connection, redis_client: RedisClient, flow: Pipeline, streamer: Streamer
) -> None:
    queue = FairQueue(redis_client, "jobs")
    queue.limit("full", TenantLimits(bytes=5))
    stage(connection, count=2)
    stage(connection, "full")
    stage(connection, own='{"delay_ms": 60000, "key": "k", "unique": {"name": "n"}}')
    stage(connection, own='{"delay_ms": 7200000, "key": "k"}')
    streamer.drain()
    stage(connection, "late")
    with queue.reader() as reader:
        [lease, *_] = reader.read(1)
        found = list_jobs(Store(connection), redis_client, "jobs")

        assert [(job.id, job.tenant, job.state) for job in found] == [
            (1, "a", "leased"),
            (2, "a", "waiting"),
            (3, "full", "waiting"),
            (4, "a", "delayed"),
            (5, "a", "delayed"),
            (6, "late", "waiting"),
        ]
        assert "is leased" in found[0].why
        assert found[2].why == "its tenant has no room in Redis"
        assert found[4].why == "it is given to Redis an hour before it is due"
        assert found[5].why == "the streamer has not written it to Redis"
        assert [(job.key, job.unique, job.due is not None) for job in found[2:5]] == [
            ("", "", False),
            ("k", "n", True),
            ("k", "", True),
        ]
        created = connection.execute("SELECT created_at FROM penstock.staged_records ORDER BY id").fetchall()
        assert [(job.action, job.object, job.staged_at) for job in found] == [
            ("send", "receipt", at) for (at,) in created
        ]
        without = list_jobs(Store(connection), None, "jobs")
        assert [job.state for job in without] == ["unknown", "unknown", "waiting", "delayed", "delayed", "unknown"]
        lease.done()


@dataclass(frozen=True)
class Expected:
    """A job that is staged, and what is to be listed of it."""

    tenant: str
    key: str
    unique: str
    state: str

    @property
    def is_movable(self) -> bool:
        return self.state in {"waiting", "delayed"} and not self.unique

    def stage(self, connection: Connection) -> None:
        own: dict[str, Any] = {"key": self.key} if self.key else {}
        own |= {"unique": {"name": self.unique}} if self.unique else {}
        own |= {"delayed": {"delay_ms": 60_000}, "dead": {"deadline": 1000}}.get(self.state, {})
        stage(connection, self.tenant, own=json.dumps(own))


KINDS = (("a", "k", False), ("a", "", True), ("b", "k", True), ("b", "", False))
EXPECTED = {
    id_: Expected(tenant, key, f"{tenant}-{state}" if is_unique else "", state)
    for id_, (state, (tenant, key, is_unique)) in enumerate(product(("leased", "waiting", "delayed", "dead"), KINDS), 1)
}

FILTERS = [
    JobFilter(*values)
    for values in product(
        (None, (2, 3, 7, 12, 99)), (None, "a"), (None, "k"), (None, "b-delayed"), (None, "leased", "delayed", "dead")
    )
]


def takes(of: JobFilter, id_: int, job: Expected) -> bool:
    return (of.ids is None or id_ in of.ids) and all(
        wanted in {None, found}
        for wanted, found in (
            (of.tenant, job.tenant),
            (of.key, job.key),
            (of.unique, job.unique),
            (of.state, job.state),
        )
    )


@pytest.fixture
def some_of_each(
    connection: Connection, redis_client: RedisClient, streamer: Streamer
) -> Iterator[dict[int, Expected]]:
    """Jobs in each state, and those of another queue that are like them in all but their state."""
    with FairQueue(redis_client, "jobs").reader() as reader:
        for state, jobs in groupby(EXPECTED.values(), lambda job: job.state):
            for job in jobs:
                job.stage(connection)
            streamer.drain()
            if state == "leased":
                assert len(reader.read(100)) == 4
        queue = FairQueue(redis_client, "jobs")
        eventually(lambda: streamer.drain() >= 0 and queue.stats().dead == 4, "deadlines have passed")
        connection.execute(STAGE.replace("'jobs'", "'others'"), ("a", '{"penstock": {"key": "k"}}', 1))
        yield EXPECTED


def test_a_filter_takes_what_it_says_in_pages_of_any_size_and_of_no_other_queue(
    some_of_each: dict[int, Expected], connection: Connection, redis_client: RedisClient
) -> None:
    for of in FILTERS:
        expected = [id_ for id_, job in some_of_each.items() if takes(of, id_, job)]
        listed = list_jobs(Store(connection), redis_client, "jobs", of)
        assert [job.id for job in listed] == expected, of
        assert [(job.tenant, job.key, job.unique, job.state) for job in listed] == [
            (job.tenant, job.key, job.unique, job.state) for job in (some_of_each[id_] for id_ in expected)
        ]
        for movable in (False, True):
            counted = count_jobs(Store(connection), redis_client, "jobs", of, movable=movable)
            chosen = [job for job in (some_of_each[id_] for id_ in expected) if job.is_movable or not movable]
            assert {(each.tenant, each.state): each.jobs for each in counted} == Counter(
                (job.tenant, job.state) for job in chosen
            ), (of, movable)
            assert [each.jobs for each in counted] == sorted((each.jobs for each in counted), reverse=True)
    every = [*some_of_each]
    for newer, size in enumerate((1, 15, 18, 19), start=18):
        pages = find_jobs(Store(connection), redis_client, "jobs", JobFilter(), size=size)
        read = [next(pages)]
        stage(connection)  # comes too late
        read += pages
        assert [job.id for page in read for job in page] == every
        assert all(len(page) <= size for page in read)
        every.append(newer)
    for after, most in ((0, 1), (1, 2), (15, 3), (16, 0)):
        listed = list_jobs(Store(connection), redis_client, "jobs", JobFilter(), after_id=after, limit=most)
        assert [job.id for job in listed] == every[after : after + most]
    assert list_jobs(Store(connection), redis_client, "jobs", parse_filter({"before": "1h"})) == []
    assert parse_filter({"id": "1,2", "up_to": "9", "state": ""}) == JobFilter([1, 2], up_to=9)
    for wrong in ({"id": "1,x"}, {"up_to": "x"}, {"state": "lost"}):
        with pytest.raises(InvalidName, match="give"):
            parse_filter(wrong)


BEFORE = datetime(2026, 11, 30, tzinfo=UTC)
SOME = [
    *product(("a", "b"), ("k", None), ("n", None), (BEFORE - timedelta(microseconds=1), BEFORE), ("jobs", "others"))
]
NARROWED: list[JobFilter] = [
    JobFilter(ids, tenant, key, name, None, before, up_to)
    for ids, tenant, key, name, before, up_to in product(
        (None, (1, 2, 11, 17, 99)), (None, "a"), (None, "k"), (None, "n"), (None, BEFORE), (None, 13)
    )
]


@pytest.mark.parametrize("statement", ["jobs", "jobs_without_headers", "letters"])
def test_a_filter_takes_the_same_of_jobs_and_of_dead_letters(statement: str, connection: Connection) -> None:
    """A role that reads no headers cannot narrow by what is in them."""
    rows = [
        (id_, channel, tenant, json.dumps({"penstock": {"key": key, "unique": {"name": name}}}), at)
        for id_, (tenant, key, name, at, channel) in enumerate(SOME, 1)
    ]
    columns, table = "(record_id, channel, key, headers, staged_at", "dead_letters"
    more = "consumer, shard, \"offset\", action, object, data, reason, attempts) VALUES (%s, %s, %s, %s, %s, 'c', 0"
    if statement != "letters":
        columns, table = "(id, channel, key, headers, created_at", "staged_records"
        more = "shard, action, object, data) OVERRIDING SYSTEM VALUE VALUES (%s, %s, %s, %s, %s, 0"
    ends = ", %s, 'a', 'o', '1', 'r', 1)" if statement == "letters" else ", 'a', 'o', '1')"
    with connection.cursor() as cursor:
        offsets = [(*row, row[0]) if statement == "letters" else row for row in rows]
        # Backwards: the rows of a table are not in the order of their ids.
        cursor.executemany(f"INSERT INTO penstock.{table} {columns}, {more}{ends}".encode(), offsets[::-1])
    place = 4 if statement == "letters" else 0
    for of in NARROWED:
        values = {**of.parameters("jobs"), "after": 1, "newest": 15, "limit": 99}
        found = [row[place] for row in connection.execute(statements("penstock")[statement], values)]
        has_headers = statement != "jobs_without_headers"
        assert (sorted(found) if statement == "letters" else found) == [
            id_
            for id_, (tenant, key, name, at, channel) in enumerate(SOME, 1)
            if channel == "jobs"
            and (statement == "letters" or 1 < id_ <= 15)
            and (of.ids is None or id_ in of.ids)
            and of.tenant in {None, tenant}
            and (of.key in {None, key} or not has_headers)
            and (of.unique in {None, name} or not has_headers)
            and (of.before is None or at < of.before)
            and (of.up_to is None or id_ <= of.up_to)
        ], of


def test_what_an_operator_does_is_done_to_what_a_filter_takes_and_to_nothing_else(
    some_of_each: dict[int, Expected], connection: Connection, redis_client: RedisClient
) -> None:
    later = datetime(2100, 1, 1, tzinfo=UTC)

    def dues() -> dict[int, datetime | None]:
        return {job.id: job.due for job in list_jobs(Store(connection), redis_client, "jobs")}

    of, before = JobFilter(tenant="a", key="k"), dues()
    moved = {id_ for id_, job in some_of_each.items() if takes(of, id_, job) and job.is_movable}
    assert move_due(Store(connection), redis_client, "jobs", of, later) == len(moved) == 2
    assert dues() == {id_: later if id_ in moved else due for id_, due in before.items()}

    before = dues()
    planned = retry_jobs(Store(connection), redis_client, "jobs", JobFilter(tenant="a"), apply=True)
    assert {(each.state, each.outcome): each.jobs for each in planned} == {
        ("leased", "nothing: a worker has it"): 2,
        ("waiting", "nothing: it is due already"): 1,
        ("delayed", "it is due now"): 2,
        ("delayed", "nothing: another job could take its unique name meanwhile"): 1,
        ("dead", "nothing: it becomes a dead letter within seconds"): 2,
    }
    changed = {id_: due for id_, due in dues().items() if due != before[id_]}
    due_now = {
        id_ for id_, job in some_of_each.items() if job.tenant == "a" and job.state == "delayed" and job.is_movable
    }
    assert changed.keys() == due_now | moved
    assert all(due is not None and due < later for due in changed.values())

    of = JobFilter(tenant="b", state="delayed")
    assert cancel_jobs(Store(connection), redis_client, "jobs", of) == Cancellation(cancelled=2, running=0)
    assert [*dues()] == [id_ for id_, job in some_of_each.items() if not takes(of, id_, job)]


def test_the_commands_list_and_show_jobs(connection: Connection, streamer: Streamer, penstock: CommandLine) -> None:
    stage(connection, own='{"delay_ms": 60000, "key": "k", "unique": {"name": "n"}}')
    streamer.drain()

    found = json.loads(penstock("jobs", "list", "jobs", "--tenant", "a", "--state", "delayed", "--json").stdout)

    assert [(job["id"], job["key"], job["unique"]) for job in found] == [(1, "k", "n")]
    shown = penstock("jobs", "show", "jobs", "1").stdout
    assert "job 1 of a, key k" in shown
    assert '"fare": 12' in shown
    unknown = penstock("jobs", "show", "jobs", "2")
    assert (unknown.returncode, "has no job 2" in unknown.stderr) == (2, True)


AWAY = "Redis does not answer"
UNKNOWN = "What jobs in Redis wait for, and whether a worker has them, is unknown: "

WITHOUT_REDIS: dict[str, tuple[int, tuple[str, ...]]] = {
    "list jobs": (0, (UNKNOWN, AWAY, "unknown Redis was not asked", "delayed it is given to Redis an hour before")),
    "list jobs --tenant b": (0, ("no jobs",)),
    "list jobs --state waiting": (3, (AWAY,)),
    "show jobs 1": (0, (UNKNOWN, AWAY, "unknown: Redis was not asked", '"fare": 12')),
    "show jobs 2": (0, (UNKNOWN, AWAY, "delayed: it is given to Redis an hour before", '"fare": 12')),
    "show jobs 3": (0, (UNKNOWN, AWAY, "delayed: Redis was not asked", '"fare": 12')),
    "show jobs 9": (2, ("has no job 9",)),
    "cancel jobs 1": (0, (UNKNOWN, AWAY, "a unknown 1", "1 job. Nothing")),
    "cancel jobs --state waiting": (3, (AWAY,)),
    "cancel jobs --state waiting --apply": (3, (AWAY,)),
    "retry jobs 1": (3, (AWAY,)),
    "retry jobs 1 --apply": (3, (AWAY,)),
    "move-due jobs 1h 1": (3, (AWAY,)),
    "move-due jobs 1h 1 --apply": (3, (AWAY,)),
    "cancel jobs 1 --apply": (0, ("cancelled 1 job, asked the workers of 0 more to roll back",)),
}
"""How a command ends while Redis is away, and what it prints; in this order.  With 3, Redis alone knows, or has to do it."""


def test_commands_show_and_cancel_what_postgres_knows_of_jobs_while_redis_is_away(
    connection: Connection, streamer: Streamer, penstock: CommandLine
) -> None:
    stage(connection)
    stage(connection, own='{"delay_ms": 7200000}')
    stage(connection, own='{"delay_ms": 60000}')
    streamer.drain()
    penstock.environment["PENSTOCK_REDIS_URL"] = "redis://127.0.0.1:1/0"
    for arguments, (code, texts) in WITHOUT_REDIS.items():
        ended = penstock("jobs", *arguments.split())
        printed = " ".join((ended.stdout + ended.stderr).split())
        assert (ended.returncode, [text for text in texts if text not in printed]) == (code, []), (arguments, printed)
        assert (AWAY in printed) is (AWAY in texts), (arguments, printed)
    assert [row[0] for row in connection.execute("SELECT id FROM penstock.staged_records ORDER BY id")] == [2, 3]


def test_the_command_shows_progress_and_a_result_of_a_job_that_is_done(
    connection: Connection, streamer: Streamer, penstock: CommandLine
) -> None:
    stage(connection)
    streamer.drain()
    connection.execute(
        "INSERT INTO penstock.job_notes (record_id, channel, progress, note) VALUES (1, 'jobs', 0.4, 'page\x1b')"
    )
    connection.execute(
        "INSERT INTO penstock.job_results (record_id, channel, result) SELECT 2, 'jobs', to_jsonb(repeat('\u202e', 3000))"
    )

    assert "\nprogress: 40%, page\\u001b\n{" in penstock("jobs", "show", "jobs", "1").stdout
    ended = penstock("jobs", "show", "jobs", "2").stdout.splitlines()
    assert ended[0] == "jobs job 2 has ended"
    assert ended[1].count("\\u202e") == 1999
    assert ended[1].endswith(" … and 1,002 more characters: --json")
    known = json.loads(penstock("jobs", "show", "jobs", "2", "--json").stdout)
    assert (known["job"], known["progress"], known["result"]) == (None, None, "\u202e" * 3000)


def test_jobs_are_cancelled_by_a_plan_that_is_carried_out(
    connection: Connection, streamer: Streamer, penstock: CommandLine, redis_client: RedisClient
) -> None:
    stage(connection, "big", 600)
    stage(connection, "big", own='{"delay_ms": 7200000}')
    stage(connection, "small", 2)
    streamer.drain()

    plan = penstock("jobs", "cancel", "jobs", "--tenant", "big", "--state", "waiting", "--json")
    assert json.loads(plan.stdout) == [{"tenant": "big", "state": "waiting", "jobs": 600}]
    assert "600 jobs. Nothing was changed." in plan.stderr
    assert penstock("jobs", "cancel", "jobs", "--all", "1").returncode == 2
    assert "there are: jobs" in penstock("jobs", "cancel", "jobz", "1", "--apply").stderr
    applied = penstock("jobs", "cancel", "jobs", "--tenant", "big", "--state", "waiting", "--apply", "--json")
    assert json.loads(applied.stdout) == {"cancelled": 600, "running": 0}
    small = JobFilter((602, 603))
    assert cancel_jobs(Store(connection), redis_client, "jobs", small) == Cancellation(cancelled=2, running=0)
    assert jobs_command(small, "cancel", "jobs") == "penstock jobs cancel jobs 602 603 --apply"
    older = JobFilter(before=datetime(2026, 11, 30, 8, 0, 0, 5, tzinfo=UTC))
    assert jobs_command(older, "retry", "jobs") == "penstock jobs retry jobs --before 2026-11-30T08:00:00+00:00 --apply"

    assert [job.id for job in list_jobs(Store(connection), redis_client, "jobs")] == [601]
    queue = FairQueue(redis_client, "jobs")
    eventually(lambda: streamer.drain() >= 0 and queue.stats().length == 0, "the streamer has emptied Redis")
    assert [noted.command for noted in list_actions(Store(connection))] == [
        "penstock jobs cancel jobs --tenant big --state waiting --apply"
    ]


def test_jobs_are_due_at_another_time(
    connection: Connection, redis_client: RedisClient, streamer: Streamer, penstock: CommandLine
) -> None:
    stage(connection, own='{"delay_ms": 60000, "key": "k"}')
    stage(connection, own='{"due": 4102444800000}')
    stage(connection)
    stage(connection, own='{"due": 4102444800000, "unique": {"name": "n"}}')
    streamer.drain()
    with FairQueue(redis_client, "jobs").reader() as reader:
        [running] = reader.read(1)
        later = datetime(2100, 1, 1, tzinfo=UTC)

        assert move_due(Store(connection), redis_client, "jobs", JobFilter((1, 3)), later) == 1
        plan = penstock("jobs", "move-due", "jobs", "0s", "2", "3", "4", "--json")
        assert json.loads(plan.stdout) == [{"tenant": "a", "state": "delayed", "jobs": 1}]
        assert "jobs with a unique name, are not moved" in plan.stderr
        assert penstock("jobs", "move-due", "jobs", "2020-01-01T00:00Z", "2", "3", "4", "--apply").stdout.startswith(
            "1 job due at"
        )
        [noted] = list_actions(Store(connection))
        assert noted.command == "penstock jobs move-due jobs 2020-01-01T00:00:00+00:00 2 3 4 --apply"
        streamer.drain()

        found = list_jobs(Store(connection), redis_client, "jobs")
        assert [(job.id, job.key, job.unique, job.state) for job in found] == [
            (1, "k", "", "delayed"),
            (2, "", "", "waiting"),
            (3, "", "", "leased"),
            (4, "", "n", "delayed"),
        ]
        assert found[0].due == later
        running.done()
        [lease] = reader.read(10)
        assert (lease.message.id, lease.message.key) == ("2", "")
        lease.done()
    assert len(FairQueue(redis_client, "jobs")) == 0


def test_limits_are_listed_set_by_a_plan_and_taken_back(
    connection: Connection, penstock: CommandLine, streamer: Streamer
) -> None:
    register_channel(Store(connection), Queue("jobs", key_limits={"": KeyLimits(in_flight=1)}))
    others = Queue("others", key_limits={"x": KeyLimits(in_flight=1)})
    register_channel(Store(connection), others)
    limit(connection, TenantLimits(weight=2), of=others, tenant="y", pipeline=Pipeline([others]))
    with pytest.raises(Unknown, match="jobz"):
        list_limits(Store(connection), "jobz")
    words = "queues", "limit", "jobs", "--key", "api", "--rate", "5"
    planned = penstock(*words)
    assert planned.stdout.startswith("key 'api' of jobs: no limits of its own → rate 5.0\n"), planned.stderr
    [declared] = json.loads(penstock("queues", "limits", "jobs", "--json").stdout)
    assert (declared["limits"], declared["set_at"]) == ({"in_flight": 1}, None)
    nothing = penstock("queues", "limit", "jobs", "--key", "api", "--remove", "--apply")
    assert nothing.returncode == 2
    assert "that key of jobs has no limits that were set; to list those: penstock queues limits jobs" in nothing.stderr
    assert penstock(*words, "--apply").returncode == 0
    found, count = list_limits(Store(connection), "jobs", limit=1)
    assert ([(each.name, each.set_at) for each in found], count) == ([("", None)], 2)
    assert "api   rate 5.0 " in penstock("queues", "limits", "jobs").stdout
    assert penstock("queues", "limits", "typo").returncode == 2
    [action] = list_actions(Store(connection))
    assert action.title == "Limit a key of jobs"  # which one needs a right in the console
    assert action.command == "penstock queues limit jobs --key api --rate 5.0 --apply"

    assert penstock("queues", "limit", "jobs", "--key", "api", "--remove", "--apply").returncode == 0
    assert connection.execute("SELECT name FROM penstock.queue_limits").fetchall() == [("y",)]
    limit(connection, TenantLimits(weight=1), of=Queue("jobs"), tenant="a", pipeline=Pipeline([Queue("jobs")]))
    assert [(each.limits, each.text) for each in list_limits(Store(connection), "jobs", name="a")[0]] == [({}, "none")]
    of_tenant = "queues", "limit", "jobs", "--tenant", "", "--elastic", "2", "--bytes", "900", "--apply"
    assert penstock(*of_tenant).returncode == 0
    [_, of_others] = list_limits(Store(connection), "jobs", name="")[0]
    assert (of_others.kind, of_others.limits) == ("tenant", {"elastic": 2, "bytes": 900})
    assert penstock("queues", "limit", "jobs", "--key", "api", "--bytes", "9").returncode == 2
    assert penstock("queues", "limit", "jobs", "--key", "api").returncode == 2
    assert penstock("queues", "limit", "jobs", "--key", "api", "--rate", "0", "--apply").returncode == 2
