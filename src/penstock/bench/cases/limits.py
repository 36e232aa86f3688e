"""What the servers give to somebody who does nothing else: the limits that a pipeline stands between."""

from itertools import islice
from time import perf_counter
from typing import Any

from penstock.bench.measuring import Sample
from penstock.bench.plant import Backlog, Plant

ENTRIES_A_CALL = 1000
"""Records a call of Redis, as Penstock's own."""

COMMITS = 2000

_APPEND = b"""
local first = tonumber(ARGV[1])
for at = 2, #ARGV, 7 do
  redis.call("XADD", KEYS[1], string.format("%.0f-0", first),
    "id", ARGV[at], "key", ARGV[at + 1], "action", ARGV[at + 2], "object", ARGV[at + 3],
    "data", ARGV[at + 4], "headers", ARGV[at + 5], "ts", ARGV[at + 6])
  first = first + 1
end
return first
"""

_ROWS = """
SELECT id::text, key, action, object, data::text, '', (extract(epoch FROM created_at) * 1000000)::bigint::text
FROM penstock.staged_records
ORDER BY id
"""


PLAIN = (
    "(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, channel text, shard integer, key text, action text, object text, "
    "data jsonb, headers jsonb, created_at timestamptz DEFAULT now())"
)
"""A table for the same rows, without what makes them Penstock's."""


def select(plant: Plant, backlog: Backlog) -> Sample:
    """Reads every row, in the order of ids, by binary COPY, and throws it away."""
    with plant.postgres(plant.staged(backlog)) as connection, connection.cursor() as cursor:
        began = perf_counter()
        with cursor.copy(
            "COPY (SELECT id, key, action, object, data, headers, created_at FROM penstock.staged_records ORDER BY id) "
            "TO STDOUT (FORMAT binary)"
        ) as copy:
            for _ in copy:
                pass
        return {"": backlog.records / (perf_counter() - began)}


def insert(plant: Plant, backlog: Backlog) -> Sample:
    """Inserts the rows, as many a transaction as were staged in one, without Penstock: into a table without its columns."""
    with plant.postgres(plant.staged(backlog)) as connection:
        connection.execute("DROP TABLE IF EXISTS bench.copied")
        connection.execute(f"CREATE TABLE bench.copied {PLAIN}".encode())
        rows = connection.execute(
            "SELECT channel, shard, key, action, object, data::text FROM penstock.staged_records ORDER BY id"
        ).fetchall()
        began = perf_counter()
        taken = iter(rows)
        while some := list(islice(taken, ENTRIES_A_CALL)):
            connection.execute(
                "INSERT INTO bench.copied (channel, shard, key, action, object, data) "
                "SELECT * FROM unnest(%s::text[], %s::int[], %s::text[], %s::text[], %s::text[], %s::jsonb[])",
                [list(column) for column in zip(*some, strict=True)],
            )
        took = perf_counter() - began
        connection.execute("DROP TABLE bench.copied")
        return {"": backlog.records / took}


def append(plant: Plant, backlog: Backlog) -> Sample:
    """Appends the records to one stream by a script that does nothing but XADD.

    A call has ``ENTRIES_A_CALL`` of them.  The commands lie ready as bytes when the clock starts, and the next one is
    sent before the reply to the last one has come, so that Redis is never without work.
    """
    with plant.postgres(plant.staged(backlog)) as connection:
        rows = connection.execute(_ROWS).fetchall()
    with plant.redis() as client:
        sha = client.script_load(_APPEND)
        redis = client.connection_pool.get_connection()
        try:
            packed = [
                redis.pack_command(
                    *("EVALSHA", sha, 1, "limit", first + 1),
                    *(value for row in rows[first : first + ENTRIES_A_CALL] for value in row),
                )
                for first in range(0, len(rows), ENTRIES_A_CALL)
            ]
            began = perf_counter()
            for number, command in enumerate(packed):
                redis.send_packed_command(command)
                if number:
                    redis.read_response()
            redis.read_response()
            took = perf_counter() - began
        finally:
            client.connection_pool.release(redis)
    return {"": backlog.records / took}


def entries(plant: Plant, backlog: Backlog) -> Sample:
    """Reads every entry of the log by XRANGE, and leaves it as the client's parser made it."""
    plant.published(backlog)
    with plant.redis() as client:
        redis = client.connection_pool.get_connection()
        try:
            began, found = perf_counter(), 0
            for stream in backlog.streams:
                found += _read_stream(redis, stream)
            took = perf_counter() - began
        finally:
            client.connection_pool.release(redis)
    assert found == backlog.records, found
    return {"": found / took}


def _read_stream(redis: Any, stream: str) -> int:
    found, after = 0, b"-"
    while True:
        redis.send_command("XRANGE", stream, after, "+", "COUNT", ENTRIES_A_CALL)
        some = redis.read_response()
        found += len(some)
        if len(some) < ENTRIES_A_CALL:
            return found
        after = b"(" + some[-1][0]


def commits(plant: Plant, commits: int = COMMITS) -> Sample:
    """Commits that write next to nothing, one after the other: what a round trip to the disk takes, in ms."""
    took = []
    with plant.postgres(plant.database("commits")) as connection:
        for _ in range(commits):
            began = perf_counter()
            connection.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
            took.append((perf_counter() - began) * 1000)
    took.sort()
    return {"": took[len(took) // 2], "-p99": took[len(took) * 99 // 100]}


def commit_rate(plant: Plant) -> Sample:
    """The same as a rate."""
    with plant.postgres(plant.database("commits")) as connection:
        began = perf_counter()
        for _ in range(COMMITS):
            connection.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
        return {"": COMMITS / (perf_counter() - began)}
