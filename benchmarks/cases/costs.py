"""What a record costs in addition to its own bytes, and what an idle pipeline costs."""

import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from benchmarks import watching
from benchmarks.application import BULK, CHANNEL
from benchmarks.backlogs import ROWS_A_TRANSACTION, Backlog, Scale, drain, fill, make_variants, unsequence
from benchmarks.cases import limits
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.processor import read_processor_s
from benchmarks.servers import BenchServers
from penstock import Log
from penstock.channels.log.streams import extents
from penstock.database.connections import Connection
from penstock.database.store import Store
from penstock.streaming.retention import retain

COPY = "bench-plain"
ENTRIES_AT_ONCE = 1000

REST_S = 3.0
"""How long an engine runs before it counts as idle: it has connected and reached its longest pause."""

IDLE_RUNS = 3
"""An idle engine is watched for this multiple of a load's duration."""

_SOURCE = f"""
CREATE TABLE bench.plain {limits.PLAIN};
CREATE TABLE bench.source AS
SELECT row_number() OVER (ORDER BY id) AS n, channel, shard, key, action, object, data FROM penstock.staged_records;
ALTER TABLE bench.source ADD PRIMARY KEY (n);
"""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Bytes of Postgres' WAL, bytes of Redis' memory, and processor time when idle."""
    backlog = Backlog(scale.records)
    watched_s = scale.seconds * IDLE_RUNS
    return [
        Case(
            name="cost-wal",
            unit="bytes",
            sentence="WAL per record: staged, sequenced, published and removed; and only staged",
            ours=lambda: _measure_wal_of_records(servers, backlog),
            limits={"the same rows": lambda: _measure_wal_of_rows(servers, backlog)},
            better="less",
            rounds=1,
        ),
        _make_memory_case(servers, backlog, "cost-memory", "payloads of letters that hardly compress"),
        _make_memory_case(*(servers, replace(backlog, in_words=True), "cost-memory-words", "payloads of words")),
        Case(
            name="cost-idle-streamer",
            unit="% of a core",
            sentence="processor time of an idle streamer, and of the servers that it polls",
            ours=lambda: _measure_idle(servers, watched_s, streamer=True),
            better="less",
            slow=True,
            rounds=1,
        ),
        Case(
            name="cost-idle-consumer",
            unit="% of a core",
            sentence="the same for a consumer",
            ours=lambda: _measure_idle(servers, watched_s, streamer=False),
            better="less",
            slow=True,
            rounds=1,
        ),
    ]


def _make_memory_case(servers: BenchServers, backlog: Backlog, name: str, payloads: str) -> Case:
    return Case(
        name=name,
        unit="bytes",
        sentence=f"Redis memory per record in the log: {payloads}",
        ours=lambda: _measure_memory_of_log(servers, backlog),
        limits={"XADD of its payload": lambda: _measure_memory_of_entries(servers, backlog, [b"data"])},
        variants=make_variants(partial(_measure_memory_of_log, servers), backlog),
        peers={"XADD of all its fields": lambda: _measure_memory_of_entries(servers, backlog, None)},
        better="less",
        rounds=1,
    )


def _measure_wal_of_records(servers: BenchServers, backlog: Backlog) -> Figures:
    url = make_source(servers, backlog)
    servers.empty_redis()
    with servers.postgres(url) as connection, servers.redis() as client:
        connection.execute("TRUNCATE penstock.staged_records")
        unsequence(connection)
        began = _read_wal(connection)
        insert(connection, "penstock.staged_records", backlog)
        staged = _read_wal(connection)
        drain(backlog, url, servers.redis_url)
        _remove(connection, client, backlog)
        ended = _read_wal(connection)
    return {"": (ended - began) / backlog.records, "-staged": (staged - began) / backlog.records}


def _measure_wal_of_rows(servers: BenchServers, backlog: Backlog) -> Figures:
    """The same rows in the same transactions, into a table of the same columns with only a primary key."""
    with servers.postgres(make_source(servers, backlog)) as connection:
        connection.execute("TRUNCATE bench.plain")
        began = _read_wal(connection)
        insert(connection, "bench.plain", backlog)
        each = (_read_wal(connection) - began) / backlog.records
    return {"": each, "-staged": each}


def make_source(servers: BenchServers, backlog: Backlog) -> str:
    """URL of a database with the rows of the backlog in a table of their own."""

    def fill_source(connection: Connection) -> None:
        fill(connection, backlog)
        connection.execute(_SOURCE.encode())

    return servers.database(f"costs_{backlog.records}", fill_source)


def insert(connection: Connection, table: str, backlog: Backlog) -> None:
    """Inserts the rows of that table into another one, ``ROWS_A_TRANSACTION`` at a time."""
    columns = "channel, shard, key, action, object, data"
    query = f"INSERT INTO {table} ({columns}) SELECT {columns} FROM bench.source WHERE n > %s AND n <= %s ORDER BY n"
    for after in range(0, backlog.records, ROWS_A_TRANSACTION):
        connection.execute(query.encode(), [after, after + ROWS_A_TRANSACTION])


def _read_wal(connection: Connection) -> int:
    """Bytes of WAL since the server was created."""
    [(found,)] = connection.execute("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint").fetchall()
    return int(found)


def _remove(connection: Connection, client: Any, backlog: Backlog) -> None:
    """Removes the records as retention does; it keeps those of a shard's newest journal row.

    Raises:
        NotMeasured: More records are left than removed.
    """
    channel = Log(CHANNEL, shards=backlog.shards, keep=timedelta(0))
    found = extents(client, backlog.pipeline.scope.namespace, channel.shard_names)
    tails = {shard: extent.tail for shard, extent in found.items()}
    connection.execute("TRUNCATE penstock.checkpoints")  # without a consumer, what is published is done
    retain(Store(connection), client, channel, tails)
    [(left,)] = connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall()
    if left > backlog.records // 2:
        raise NotMeasured(f"retention left {left} records")


def _measure_memory_of_log(servers: BenchServers, backlog: Backlog) -> Figures:
    servers.publish(backlog)
    with servers.redis() as client:
        return {"": sum(_read_memory(client, stream) for stream in backlog.streams) / backlog.records}


def _measure_memory_of_entries(servers: BenchServers, backlog: Backlog, fields: Iterable[bytes] | None) -> Figures:
    """Plain entries with some of their fields, appended by ``XADD`` to as many streams with ids by Redis."""
    servers.publish(backlog.kept_as("plain"))
    used = 0
    with servers.redis() as client:
        for stream in backlog.streams:
            client.delete(COPY)
            after = "-"
            while entries := client.xrange(stream, after, "+", count=ENTRIES_AT_ONCE):
                batch = client.pipeline(transaction=False)
                for _, entry in entries:
                    batch.xadd(COPY, {f: entry[f] for f in fields} if fields else entry)
                batch.execute()
                after = "(" + entries[-1][0].decode()
            used += _read_memory(client, COPY)
        client.delete(COPY)
    return {"": used / backlog.records}


def _read_memory(client: Any, key: str) -> int:
    return int(client.memory_usage(key, samples=0))  # every entry, not an estimate from samples


def _measure_idle(servers: BenchServers, seconds: float, *, streamer: bool) -> Figures:
    """Percent of a core: used by the process, and by Redis and its Postgres backends together."""
    url = servers.stage(Backlog(0))
    consumers = [] if streamer else [BULK]
    with (
        servers.postgres(url) as connection,
        servers.redis() as client,
        watching.run_engine("inline", url, servers.redis_url, streamer=streamer, consumers=consumers) as process,
    ):
        time.sleep(REST_S)
        backends = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'penstock %' AND datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )
        pids = [int(pid) for (pid,) in backends] + [int(client.info("server")["process_id"])]
        before = [read_processor_s(process), sum(map(read_processor_s, pids))]
        began = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        after = [read_processor_s(process), sum(map(read_processor_s, pids))]
    own, theirs = (100 * (b - a) / took for a, b in zip(before, after, strict=True))
    return {"": own, "-servers": theirs}
