"""``finish_records`` deletes the rows of a queue's records: the worker that gets an id back has its effect."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from penstock import Ick, Log, Queue
from penstock.database.connections import Connection
from penstock.database.registry import register_channel, registered_channels
from penstock.database.store import Store
from penstock.errors import DeclarationError

FINISH = "SELECT * FROM penstock.finish_records(%s, %s)"


@pytest.fixture(autouse=True)
def _channels(connection: Connection) -> None:
    for channel in (Queue("jobs"), Log("things"), Ick("index")):
        register_channel(Store(connection), channel)


def stage(connection: Connection, channel: str, count: int) -> list[int]:
    rows = connection.execute(
        "INSERT INTO penstock.staged_records (channel, shard, key, action, object, data) "
        "SELECT %s, 0, 'k', 'a', 'o', '{}' FROM generate_series(1, %s) RETURNING id",
        (channel, count),
    )
    return [row[0] for row in rows]


def finish(connection: Connection, channel: str, ids: list[int]) -> list[int]:
    return sorted(row[0] for row in connection.execute(FINISH, (channel, ids)))


def test_the_first_call_gets_the_ids_and_the_second_gets_none(connection: Connection) -> None:
    ids = stage(connection, "jobs", 3)

    assert finish(connection, "jobs", ids[:2]) == ids[:2]
    assert finish(connection, "jobs", ids) == ids[2:]
    assert finish(connection, "jobs", ids) == []


@pytest.mark.parametrize("channel", ["things", "index", "unregistered"])
def test_records_of_other_channels_are_not_touched(connection: Connection, channel: str) -> None:
    ids = stage(connection, channel, 2)

    assert finish(connection, channel, ids) == []
    assert finish(connection, "jobs", ids) == []
    [(left,)] = connection.execute("SELECT count(*) FROM penstock.staged_records")
    assert left == 2


def test_a_second_worker_waits_for_the_first_ones_commit_and_finds_nothing(
    connection: Connection, database_url: str
) -> None:
    [first, second] = stage(connection, "jobs", 2)
    with psycopg.connect(database_url, autocommit=True) as other, ThreadPoolExecutor(1) as pool:
        with connection.transaction():
            assert finish(connection, "jobs", [first, second]) == [first, second]
            waiting = pool.submit(finish, other, "jobs", [second, first])
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
        assert waiting.result(60) == []


def test_after_a_rollback_the_second_worker_has_the_effect(connection: Connection, database_url: str) -> None:
    [record] = stage(connection, "jobs", 1)
    with psycopg.connect(database_url, autocommit=True) as other, ThreadPoolExecutor(1) as pool:
        with connection.transaction(force_rollback=True):
            assert finish(connection, "jobs", [record]) == [record]
            waiting = pool.submit(finish, other, "jobs", [record])
        assert waiting.result(60) == [record]


def test_a_hostile_search_path_changes_nothing(connection: Connection) -> None:
    [record] = stage(connection, "jobs", 1)
    connection.execute("CREATE TEMP TABLE channels (channel text, kind text)")
    connection.execute("CREATE TEMP TABLE staged_records (id bigint, channel text)")
    connection.execute("SET search_path = pg_temp, public")

    assert finish(connection, "jobs", [record]) == [record]


def test_nobody_may_call_it_without_a_grant(connection: Connection) -> None:
    [(acl,)] = connection.execute("SELECT proacl::text FROM pg_proc WHERE proname = 'finish_records'").fetchall()

    assert "{=" not in acl
    assert ",=" not in acl


def test_the_streams_of_a_queue_may_change_and_its_shards_may_not(connection: Connection) -> None:
    register_channel(Store(connection), Queue("jobs", streams=3, hand=2))
    found = registered_channels(Store(connection))["jobs"]
    assert (found.kind, found.shards, found.streams, found.hand) == ("queue", 1, 3, 2)

    with pytest.raises(DeclarationError, match="declared as a queue of 2 shards"):
        register_channel(Store(connection), Queue("jobs", shards=2))
    with pytest.raises(DeclarationError, match="declared as a log of 1 shard,"):
        register_channel(Store(connection), Log("jobs", shards=1))
    assert registered_channels(Store(connection))["jobs"].streams == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"streams": 0}, "streams is 0; it takes 1 to 256"),
        ({"streams": 257}, "streams is 257; it takes 1 to 256"),
        ({"streams": "8"}, "streams is '8'; it takes 1 to 256"),
        ({"hand": 0}, "hand is 0; it takes 1 to 16"),
        ({"streams": 3, "hand": 4}, "hand is 4; it takes 1 to 3"),
        ({"shards": 0}, "shards is 0"),
        ({"keep": timedelta(-1)}, "keep is"),
        ({"max_bytes": 0}, "max_bytes is 0"),
    ],
)
def test_a_queue_has_limits(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        Queue("jobs", **arguments)  # type: ignore[arg-type]
