"""Maintenance of queues goes on where it stopped: from shard to shard, and from page to page."""

import json

import psycopg
import pytest
import redis

from fixtures.constants import SetConstants
from penstock import Queue
from penstock.clients import FairQueue
from penstock.database.registry import register_channel, registered_channels
from penstock.database.store import Store
from penstock.declaring.unique import MAX_NAME_BYTES, TenantLimits
from penstock.records import BEGINNING, Epoch, Offset
from penstock.streaming.queues import Queues, make_queued

JOBS = Queue("jobs", shards=3)


@pytest.fixture
def queues(connection: psycopg.Connection, redis_client: redis.Redis) -> Queues:
    register_channel(Store(connection), JOBS)
    made = Queues(Store(connection), redis_client, Epoch(1))
    made.update(registered_channels(Store(connection)))
    return made


def maintain(queues: Queues, shards: int = 1) -> int:
    tails = {shard: Offset(9) for shard in JOBS.shard_names[:shards]}
    return queues.maintain(tails)


def stage(connection: psycopg.Connection, shard: int, *ids: int) -> None:
    for id_ in ids:
        connection.execute(
            "INSERT INTO penstock.staged_records (id, channel, shard, key, action, object, data) OVERRIDING SYSTEM VALUE "
            "VALUES (%s, 'jobs', %s, 't', 'a', 'o', '1')",
            [id_, shard],
        )


def waiting(connection: psycopg.Connection, *, given: bool) -> list[int]:
    found = connection.execute(
        "SELECT record_id FROM penstock.waiting_records WHERE is_given = %s ORDER BY record_id", [given]
    ).fetchall()
    return [id_ for (id_,) in found]


@pytest.mark.parametrize(("budget_s", "given"), [(0.0, [[1], [1, 2], [1, 2, 3], [1, 2, 3]]), (60.0, [[1, 2, 3]] * 4)])
def test_each_shard_has_its_turn_and_all_of_them_as_long_as_there_is_time(
    budget_s: float, given: list[list[int]], queues: Queues, connection: psycopg.Connection, set_constants: SetConstants
) -> None:
    set_constants("streaming.queues", MAINTAIN_S=budget_s)
    for shard in range(3):
        stage(connection, shard, shard + 1)
        connection.execute("INSERT INTO penstock.waiting_records VALUES (%s, 'jobs', %s)", [shard + 1, shard])

    assert [(maintain(queues, 3), waiting(connection, given=True))[1] for _ in given] == given


def test_what_redis_lacks_is_found_page_by_page(
    queues: Queues, connection: psycopg.Connection, redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    """Of the journal, and of the waiting records that Redis was given."""
    set_constants("streaming.queues", RECONCILE_RECORDS=2)
    for offset in (1, 2, 3):
        stage(connection, 0, offset)
        connection.execute("INSERT INTO penstock.journal VALUES ('jobs', 0, %s, %s, %s, 1)", [offset, offset, [offset]])
    seen = []
    for _ in range(3):
        maintain(queues)
        seen.append(waiting(connection, given=True))
    assert seen == [[1, 2], [1, 2, 3], [1, 2, 3]]

    connection.execute("DELETE FROM penstock.journal")
    queue = FairQueue(redis_client, "jobs")
    queue.delete("t", ["1", "2", "3"])
    assert [(maintain(queues), len(queue))[1] for _ in range(3)] == [2, 3, 3]


def test_a_round_says_how_many_records_it_gave_to_redis(
    queues: Queues, connection: psycopg.Connection, redis_client: redis.Redis
) -> None:
    """Those that are due, and those whose tenants have room again; none that was done meanwhile, or has no room yet."""
    stage(connection, 0, 1, 2, 3, 4, 5)
    for id_, tenant in ((1, None), (2, None), (3, "t"), (4, "t"), (5, "full"), (6, None)):
        connection.execute("INSERT INTO penstock.waiting_records VALUES (%s, 'jobs', 0, %s)", [id_, tenant])
    connection.execute("UPDATE penstock.staged_records SET key = 'full' WHERE id = 5")
    queue = FairQueue(redis_client, "jobs")
    queue.limit("full", TenantLimits(bytes=10))
    queue.write("full", "0123456789")

    assert maintain(queues) == 4
    assert waiting(connection, given=True) == [1, 2, 3, 4]
    assert waiting(connection, given=False) == [5]
    assert maintain(queues) == 0


@pytest.mark.parametrize(
    ("for_s", "unique"),
    [
        (0.001, ("n", "window", "1")),
        ((2**52 - 1) / 1000, ("n", "window", f"{2**52 - 1}")),
        (0, ("n", "running", "")),
        (-1, ("n", "running", "")),
        (2**52 / 1000, ("n", "running", "")),
        ("60", ("n", "running", "")),
        (None, ("n", "running", "")),
    ],
)
def test_a_window_that_lua_cannot_count_is_none(for_s: object, unique: tuple[str, str, str]) -> None:
    headers = json.dumps({"penstock": {"unique": {"name": "n", "until": "window", "for_s": for_s}}})

    assert make_queued(BEGINNING, (1, "t", "a", "o", "1", headers, 5)).unique == unique


def test_a_record_that_waited_for_a_name_that_another_has_is_finished(
    queues: Queues, connection: psycopg.Connection
) -> None:
    """The one that has it is to be done; both had been refused before."""
    stage(connection, 0, 1, 2)
    named = json.dumps({"penstock": {"unique": {"name": "n"}}})
    connection.execute("UPDATE penstock.staged_records SET headers = %s", [named])
    for id_ in (1, 2):
        connection.execute("INSERT INTO penstock.waiting_records VALUES (%s, 'jobs', 0)", [id_])

    assert maintain(queues) == 1
    assert connection.execute("SELECT id FROM penstock.staged_records").fetchall() == [(1,)]
    maintain(queues)
    assert connection.execute("SELECT record_id FROM penstock.waiting_records").fetchall() == [(1,)]


@pytest.mark.parametrize(("length", "stored"), [(MAX_NAME_BYTES, MAX_NAME_BYTES), (MAX_NAME_BYTES + 1, 64)])
def test_a_unique_name_is_stored_as_it_is_unless_it_is_too_long_for_an_index(
    length: int, stored: int, queues: Queues, connection: psycopg.Connection
) -> None:
    """As every release does it: two of them that differ would give one name to two jobs."""
    stage(connection, 0, 1)
    headers = json.dumps({"penstock": {"unique": {"name": "n" * length}}})
    connection.execute("UPDATE penstock.staged_records SET headers = %s", [headers])
    connection.execute("INSERT INTO penstock.waiting_records VALUES (1, 'jobs', 0)")

    assert maintain(queues) == 1
    assert connection.execute("SELECT length(name) FROM penstock.unique_names").fetchall() == [(stored,)]


def test_cancelled_jobs_are_forgotten_page_by_page(
    queues: Queues, connection: psycopg.Connection, redis_client: redis.Redis, set_constants: SetConstants
) -> None:
    """A round whose time is over leaves the rest to the next one."""
    set_constants("streaming.queues", RECONCILE_RECORDS=2, MAINTAIN_S=0.0)
    queue = FairQueue(redis_client, "jobs")
    for id_ in range(1, 6):
        queue.write("t", "1", id=str(id_))
        connection.execute("INSERT INTO penstock.cancellations VALUES (%s, 'jobs', 0, false)", [id_])

    assert [(maintain(queues), len(queue))[1] for _ in range(4)] == [3, 1, 0, 0]
