# /// script
# requires-python = ">=3.11"
# dependencies = ["psycopg[binary]>=3.2", "redis[hiredis]>=5.2"]
#
# [tool.penstock]
# extension = "pgq"
# apt = "postgresql-15-pgq3 pgqd"
# ///
"""PgQ, whose ticker ``pgqd`` divides a queue into batches at snapshots, and a short relay from it into a stream.

A batch is sent, and then finished; after a crash between the two it is sent again.  Staged rows wait for the next tick.
"""

import atexit
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness

TICK_S = 0.005
"""The ticker's pause.  Each tick is a commit: with a fifth of it, producers no longer reach their rate on two cores."""

EventRows = Sequence[Sequence[Any]]


def start_ticker(connection: harness.Connection, _client: Any) -> None:
    """Starts ``pgqd`` for this database."""
    program = shutil.which("pgqd")
    if program is None:
        raise SystemExit("pgqd is not installed")
    directory = Path(tempfile.mkdtemp(prefix="peer-pgq-"))
    atexit.register(shutil.rmtree, directory)
    settings = directory / "pgqd.ini"
    where = connection.info
    settings.write_text(
        f"[pgqd]\nsyslog = 0\nticker_period = {TICK_S}\ndatabase_list = {where.dbname}\n"
        f"base_connstr = host={where.host} port={where.port} user={where.user}\n"
    )
    ticker = subprocess.Popen([program, "-q", settings], stderr=subprocess.DEVNULL)  # noqa: S603  Debian's
    atexit.register(ticker.wait)
    atexit.register(ticker.terminate)


def send(client: Any, rows: EventRows) -> None:
    """One round trip."""
    with client.pipeline(transaction=False) as pipeline:
        for row in rows:
            pipeline.xadd(harness.STREAM, harness.make_fields(row))
        pipeline.execute()


def make_relay(send: Callable[[Any, EventRows], None]) -> Callable[[harness.Connection, Any], int]:
    """A round sends what was committed between two ticks, read by a cursor: this may be a whole backlog."""

    def relay(connection: harness.Connection, client: Any) -> int:
        moved = 0
        with connection.cursor(binary=True) as cursor:
            cursor.execute("SELECT pgq.next_batch('outbox', 'relay')")
            (batch,) = cursor.fetchone() or (None,)
            if batch is None:
                return 0
            with connection.transaction():
                cursor.execute("SELECT * FROM pgq.get_batch_cursor(%s, 'batch', %s)", [batch, harness.BATCH])
                while events := cursor.fetchall():
                    # id, time, transaction, retry, type, data, extra1: key, extra2: object
                    send(client, [(e[0], e[6], e[4], e[7], e[5], e[1]) for e in events])
                    moved += len(events)
                    cursor.execute(f"FETCH {harness.BATCH} FROM batch")
            cursor.execute("SELECT pgq.finish_batch(%s)", [batch])
        return moved

    return relay


def make_peer(send: Callable[[Any, EventRows], None]) -> harness.Peer:
    """The queue, with a tick whenever the ticker polls and finds new events."""
    return harness.Peer(
        create="CREATE EXTENSION pgq; "
        "SELECT pgq.create_queue('outbox'); SELECT pgq.register_consumer('outbox', 'relay'); "
        "SELECT pgq.set_queue_config('outbox', 'ticker_max_lag', '0'); "
        "SELECT pgq.set_queue_config('outbox', 'ticker_max_count', '1')",
        fill="SELECT count(pgq.insert_event('outbox', action, data::text, key, object, NULL, NULL)) "
        "FROM (SELECT * FROM penstock.staged_records ORDER BY id) s",
        settle="SELECT pgq.ticker()",
        stage="SELECT pgq.insert_event('outbox', 'insert', payload, key, 'movement', NULL, NULL) "
        "FROM unnest(%(keys)s::text[], %(payloads)s::text[]) AS r (key, payload)",
        relay=make_relay(send),
        serve=start_ticker,
    )


if __name__ == "__main__":
    harness.main(make_peer(send))
