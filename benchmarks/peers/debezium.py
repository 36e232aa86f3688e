# /// script
# requires-python = ">=3.11"
# dependencies = ["pydbzengine==3.6.3.0", "psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
# ///
"""Debezium's embedded engine, which reads the WAL, with a handler that sends a batch in one round trip.

It needs Java and ``wal_level = logical``.  The engine is started before the rows are written, so that its start is in no
figure; the backlog is what has been written when the first batch arrives.
"""

import json
import os
import queue
import shutil
import sys
import tempfile
import threading
from typing import Any

import harness
import psycopg

SLOT = "peer_debezium"
PASSWORD = "peer"  # noqa: S105  the server is removed at the end
moved: "queue.SimpleQueue[int]" = queue.SimpleQueue()
engines: list[threading.Thread] = []
is_draining = sys.argv[1] == "drain"
directory = tempfile.mkdtemp(prefix="peer-debezium-")


def _start(client: Any) -> None:
    from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine  # noqa: PLC0415  starts a JVM

    class BatchSender(BasePythonChangeHandler):  # type: ignore[misc]  # it ships no types
        def handleJsonBatch(self, records: Any) -> None:  # noqa: N802  the library's name
            with client.pipeline(transaction=False) as pipeline:
                for record in records:
                    row = json.loads(str(record.value()))["after"]
                    values = (row["id"], row["key"], row["action"], row["object"], row["payload"])
                    names = ("id", "key", "action", "object", "data")
                    entry = dict(zip(names, values, strict=True))
                    pipeline.xadd(harness.STREAM, {**entry, "headers": "", "ts": row["created_at"]})
                pipeline.execute()
            moved.put(len(records))

    where = psycopg.conninfo.conninfo_to_dict(os.environ["PEER_DATABASE_URL"])
    host = str(where.get("host") or "127.0.0.1")
    os.chdir(directory)  # it writes a log beside itself
    engine = DebeziumJsonEngine(
        properties={
            "name": "peer",
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "offset.storage": "org.apache.kafka.connect.storage.MemoryOffsetBackingStore",
            "offset.flush.interval.ms": "1000",
            "topic.prefix": "peer",
            "database.hostname": "127.0.0.1" if host.startswith("/") else host,
            "database.port": str(where.get("port") or 5432),
            "database.user": str(where.get("user") or "postgres"),
            "database.password": str(where.get("password") or PASSWORD),
            "database.dbname": str(where["dbname"]),
            "table.include.list": "public.peer_debezium",
            "plugin.name": "pgoutput",
            "slot.name": SLOT,
            "publication.autocreate.mode": "filtered",
            "snapshot.mode": "no_data",
            "tombstones.on.delete": "false",
            "converter.schemas.enable": "false",
            "poll.interval.ms": "1",
        },
        handler=BatchSender(),
    )
    engines.append(threading.Thread(target=engine.run, daemon=True))
    engines[0].start()


def start(connection: harness.Connection, client: Any) -> None:
    """Starts the engine, and waits until it reads the WAL."""
    # The engine connects by TCP, where the server asks for a password.
    connection.execute(f"ALTER ROLE CURRENT_USER PASSWORD '{PASSWORD}'".encode())
    _start(client)
    _await_slot(connection)


def relay(_connection: harness.Connection, _client: Any) -> int:
    """Number of records that the engine has sent since the last call."""
    while engines[0].is_alive():
        try:
            return moved.get(timeout=0.05)
        except queue.Empty:
            if not is_draining:
                return 0
    raise SystemExit("Debezium's engine ended")


def _await_slot(connection: harness.Connection) -> None:
    active = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s AND active"
    for _ in range(600):
        if connection.execute(active, [SLOT]).fetchone() == (1,):
            return
        engines[0].join(0.1)
    raise SystemExit("Debezium's engine does not read the WAL")


if __name__ == "__main__":
    status = 1
    try:
        harness.main(
            harness.Peer(
                create="CREATE TABLE peer_debezium (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
                "key text, action text, object text, payload jsonb, created_at timestamptz DEFAULT now())",
                fill="INSERT INTO peer_debezium (key, action, object, payload) "
                "SELECT key, action, object, data FROM penstock.staged_records ORDER BY id",
                stage="INSERT INTO peer_debezium (key, action, object, payload) SELECT key, 'insert', 'movement', payload "
                "FROM unnest(%(keys)s::text[], %(payloads)s::jsonb[]) AS r (key, payload)",
                relay=relay,
                start=start,
            )
        )
        status = 0
    except SystemExit as reason:
        print(reason, file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(status)  # the engine's threads would keep the process alive
