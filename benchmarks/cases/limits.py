"""The most that the servers give to a client that does nothing else: the limits of a pipeline."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from time import perf_counter
from typing import Any

from benchmarks.backlogs import Backlog
from benchmarks.measuring import Figures
from benchmarks.servers import BenchServers
from penstock.streaming.unpublished import BATCH_RECORDS

ENTRIES_A_CALL = 1000
"""Records per call of Redis, as in Penstock."""

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
"""Columns of a table for the same rows, without the columns that Penstock sequences by."""


def select_rows(servers: BenchServers, backlog: Backlog) -> Figures:
    """Reads every row in the order of ids by binary COPY, and discards it."""
    with servers.postgres(servers.stage(backlog)) as connection, connection.cursor() as cursor:
        began = perf_counter()
        with cursor.copy(
            "COPY (SELECT id, key, action, object, data, headers, created_at FROM penstock.staged_records ORDER BY id) "
            "TO STDOUT (FORMAT binary)"
        ) as copy:
            for _ in copy:
                pass
        return {"": backlog.records / (perf_counter() - began)}


def insert_rows(servers: BenchServers, backlog: Backlog) -> Figures:
    """Inserts the rows without Penstock, as many per transaction as were staged in one, into a table without its columns."""
    with servers.postgres(servers.stage(backlog)) as connection:
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


def append_records(servers: BenchServers, backlog: Backlog) -> Figures:
    """Appends the records to one stream by a script that only calls XADD, ``ENTRIES_A_CALL`` per call."""
    with prepare_append(servers, backlog) as append:
        began = perf_counter()
        append()
        return {"": backlog.records / (perf_counter() - began)}


@contextmanager
def prepare_append(servers: BenchServers, backlog: Backlog) -> Iterator[Callable[[], None]]:
    """Yields what appends the records.

    The commands are packed already, and each is sent before the reply to the previous one has been read, so that Redis
    is never idle.
    """
    with servers.postgres(servers.stage(backlog)) as connection:
        rows = connection.execute(_ROWS).fetchall()
    with servers.redis() as client:
        sha = client.script_load(_APPEND)
        redis = client.connection_pool.get_connection()
        packed = [
            redis.pack_command(
                *("EVALSHA", sha, 1, "limit", first + 1),
                *(value for row in rows[first : first + ENTRIES_A_CALL] for value in row),
            )
            for first in range(0, len(rows), ENTRIES_A_CALL)
        ]

        def append() -> None:
            for number, command in enumerate(packed):
                redis.send_packed_command(command)
                if number:
                    redis.read_response()
            redis.read_response()

        try:
            yield append
        finally:
            client.connection_pool.release(redis)


def read_entries(servers: BenchServers, backlog: Backlog) -> Figures:
    """Reads every entry of the log by XRANGE, about ``ENTRIES_A_CALL`` records per call, as the client's parser returns it."""
    servers.publish(backlog)
    most = ENTRIES_A_CALL if backlog.form == "plain" else ENTRIES_A_CALL // BATCH_RECORDS
    with servers.redis() as client:
        redis = client.connection_pool.get_connection()
        try:
            began, found = perf_counter(), 0
            for stream in backlog.streams:
                found += _read_stream(redis, stream, most)
            took = perf_counter() - began
        finally:
            client.connection_pool.release(redis)
    assert found == backlog.records, found
    return {"": found / took}


def _read_stream(redis: Any, stream: str, most: int) -> int:
    """Number of records: the offset of the last one."""
    last = b"0-0"
    while True:
        redis.send_command("XRANGE", stream, b"(" + last, "+", "COUNT", most)
        some = redis.read_response()
        if not some:
            return int(last.partition(b"-")[0])
        last = some[-1][0]


def time_commits(servers: BenchServers, commits: int = COMMITS) -> Figures:
    """Commits that write almost nothing, one after another: the time of a round trip to the disk, in ms."""
    took = []
    with servers.postgres(servers.database("commits")) as connection:
        for _ in range(commits):
            began = perf_counter()
            connection.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
            took.append((perf_counter() - began) * 1000)
    took.sort()
    return {"": took[len(took) // 2], "-p99": took[len(took) * 99 // 100]}


def measure_commit_rate(servers: BenchServers) -> Figures:
    """The same commits, per second."""
    with servers.postgres(servers.database("commits")) as connection:
        began = perf_counter()
        for _ in range(COMMITS):
            connection.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
        return {"": COMMITS / (perf_counter() - began)}
