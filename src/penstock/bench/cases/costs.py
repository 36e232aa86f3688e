"""What a record costs beside its own bytes, and what a pipeline costs that has nothing to do."""

import time
from collections.abc import Iterable
from datetime import timedelta

from penstock import Log
from penstock.bench import watching
from penstock.bench.application import BULK, CHANNEL
from penstock.bench.cases import limits
from penstock.bench.measuring import Case, NotMeasured, Sample
from penstock.bench.plant import ROWS_A_TRANSACTION, Backlog, Plant, Scale, drain, fill, unsequence
from penstock.channels.log import extents
from penstock.channels.server import RedisClient
from penstock.database.connections import Connection
from penstock.streaming.retention import retain

PLAIN = "bench-plain"
ENTRIES_AT_ONCE = 1000

REST_S = 3.0
"""How long an engine runs before it counts as idle: it has connected, and come to its longest pause."""

IDLE_RUNS = 3
"""Times the seconds of a load that an idle engine is watched."""

_SOURCE = f"""
CREATE TABLE bench.plain {limits.PLAIN};
CREATE TABLE bench.source AS
SELECT row_number() OVER (ORDER BY id) AS n, channel, shard, key, action, object, data FROM penstock.staged_records;
ALTER TABLE bench.source ADD PRIMARY KEY (n);
"""


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """Bytes of Postgres' WAL, bytes of Redis' memory, and the processor's time of those who wait."""
    backlog = Backlog(scale.records)
    watched_s = scale.seconds * IDLE_RUNS
    return [
        Case(
            name="cost-wal",
            unit="bytes",
            sentence="WAL of a record: staged, sequenced, published and removed; and staged alone",
            ours=lambda: _wal_of_records(plant, backlog),
            limits={"the same rows": lambda: _wal_of_rows(plant, backlog)},
            better="less",
            rounds=1,
        ),
        Case(
            name="cost-memory",
            unit="bytes",
            sentence="Redis' memory of a record in the log",
            ours=lambda: _memory_of_log(plant, backlog),
            limits={
                "XADD of its payload": lambda: _memory_of_entries(plant, backlog, [b"data"]),
            },
            peers={"XADD of all its fields": lambda: _memory_of_entries(plant, backlog, None)},
            better="less",
            rounds=1,
        ),
        Case(
            name="cost-idle-streamer",
            unit="% of a core",
            sentence="the processor's time of a streamer with nothing to do, and of the servers that it asks",
            ours=lambda: _idle(plant, watched_s, streamer=True),
            better="less",
            slow=True,
            rounds=1,
        ),
        Case(
            name="cost-idle-consumer",
            unit="% of a core",
            sentence="the same of a consumer",
            ours=lambda: _idle(plant, watched_s, streamer=False),
            better="less",
            slow=True,
            rounds=1,
        ),
    ]


def _wal_of_records(plant: Plant, backlog: Backlog) -> Sample:
    url = _source(plant, backlog)
    plant.empty_redis()
    with plant.postgres(url) as connection, plant.redis() as client:
        connection.execute("TRUNCATE penstock.staged_records")
        unsequence(connection)
        began = _wal(connection)
        _insert(connection, "penstock.staged_records", backlog)
        staged = _wal(connection)
        drain(backlog, url, plant.redis_url)
        _remove(connection, client, backlog)
        ended = _wal(connection)
    return {
        "": (ended - began) / backlog.records,
        "-staged": (staged - began) / backlog.records,
    }


def _wal_of_rows(plant: Plant, backlog: Backlog) -> Sample:
    """The same rows in the same transactions, into a table of the same columns that has nothing but a primary key."""
    with plant.postgres(_source(plant, backlog)) as connection:
        connection.execute("TRUNCATE bench.plain")
        began = _wal(connection)
        _insert(connection, "bench.plain", backlog)
        each = (_wal(connection) - began) / backlog.records
    return {"": each, "-staged": each}


def _source(plant: Plant, backlog: Backlog) -> str:
    """A database with the rows of the backlog in a table of their own."""

    def filled(connection: Connection) -> None:
        fill(connection, backlog)
        connection.execute(_SOURCE.encode())

    return plant.database(f"costs_{backlog.records}", filled)


def _insert(connection: Connection, table: str, backlog: Backlog) -> None:
    columns = "channel, shard, key, action, object, data"
    query = f"INSERT INTO {table} ({columns}) SELECT {columns} FROM bench.source WHERE n > %s AND n <= %s ORDER BY n"
    for after in range(0, backlog.records, ROWS_A_TRANSACTION):
        connection.execute(query.encode(), [after, after + ROWS_A_TRANSACTION])


def _wal(connection: Connection) -> int:
    """Bytes of WAL since the server was made."""
    [(found,)] = connection.execute(
        "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
    ).fetchall()
    return int(found)


def _remove(connection: Connection, client: RedisClient, backlog: Backlog) -> None:
    """What retention does with records that nobody wants any more; those of a shard's newest entry in the journal stay.

    Raises:
        NotMeasured: More are left than removed.
    """
    channel = Log(CHANNEL, shards=backlog.shards, keep=timedelta(0))
    found = extents(client, backlog.pipeline.namespace, channel.shard_names)
    tails = {shard: extent.tail for shard, extent in found.items()}
    connection.execute("TRUNCATE penstock.checkpoints")  # nobody reads: what is published is done
    retain(connection, client, channel, tails)
    [(left,)] = connection.execute("SELECT count(*) FROM penstock.staged_records").fetchall()
    if left > backlog.records // 2:
        raise NotMeasured(f"retention has left {left} records")


def _memory_of_log(plant: Plant, backlog: Backlog) -> Sample:
    plant.published(backlog)
    with plant.redis() as client:
        return {"": sum(_memory(client, stream) for stream in backlog.streams) / backlog.records}


def _memory_of_entries(plant: Plant, backlog: Backlog, fields: Iterable[bytes] | None) -> Sample:
    """The same entries, with some of their fields, appended by ``XADD`` to as many streams, which give them their ids."""
    plant.published(backlog)
    used = 0
    with plant.redis() as client:
        for stream in backlog.streams:
            client.delete(PLAIN)
            after = "-"
            while entries := client.xrange(stream, after, "+", count=ENTRIES_AT_ONCE):
                asking = client.pipeline(transaction=False)
                for _, entry in entries:
                    asking.xadd(PLAIN, {f: entry[f] for f in fields} if fields else entry)
                asking.execute()
                after = "(" + entries[-1][0].decode()
            used += _memory(client, PLAIN)
        client.delete(PLAIN)
    return {"": used / backlog.records}


def _memory(client: RedisClient, key: str) -> int:
    return int(client.memory_usage(key, samples=0))  # all of it, not an estimate


def _idle(plant: Plant, seconds: float, *, streamer: bool) -> Sample:
    """Percent of a core: of the process itself, and of Redis and of its backends of Postgres together."""
    url = plant.staged(Backlog(0))
    consumers = [] if streamer else [BULK]
    with (
        plant.postgres(url) as connection,
        plant.redis() as client,
        watching.running(
            "inline", url, plant.redis_url, streamer=streamer, consumers=consumers
        ) as process,
    ):
        time.sleep(REST_S)
        backends = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'penstock %' AND datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )
        servers = [int(pid) for (pid,) in backends] + [int(client.info("server")["process_id"])]
        before = [_processor_s(process), sum(map(_processor_s, servers))]
        began = time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        after = [_processor_s(process), sum(map(_processor_s, servers))]
    own, theirs = (100 * (b - a) / took for a, b in zip(before, after, strict=True))
    return {"": own, "-servers": theirs}


def _processor_s(process: int) -> float:
    """What a process has used of processors, to the microsecond: Linux makes the clock's number out of the process's."""
    return time.clock_gettime((~process << 3) | 2)
