"""One state of the database for all tasks: a snapshot, held in the driver and imported by each task."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from penstock.database.connections import TableConnection, connect_postgres
from penstock.database.errors import postgres_errors
from penstock.database.formats import FIX_FORMATS
from penstock.database.transactions import set_local
from penstock.reconciling.cut import export_snapshot, import_snapshot


@contextmanager
def snapshot(database_url: str) -> Iterator[str]:
    """Exports a snapshot for ``penstock.table`` and yields its name; tasks can read in it until the block ends.

        with snapshot(url) as name:
            rides = spark.read.format("penstock.table").option("table", "rides").option("snapshot", name).load()
            rides.write.parquet("rides")

    Frames are lazy, so the action belongs into the block.  While it is open, Postgres cannot vacuum rows that are deleted.

    Args:
        database_url: The server that the tasks read: the primary, or a standby for standby reads.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with connect_postgres(database_url, application="snapshot", kind=TableConnection) as holder:
        with postgres_errors("exporting a snapshot"):
            # Not the connection's own cursor, which would send the settings before it.
            psycopg.Cursor(holder).execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            for statement in set_local(holder.settings):
                holder.execute(statement)
            name = export_snapshot(holder)
        try:
            yield name
        finally:
            holder.close()


def begin_reading(cursor: Any, snapshot: str | None) -> None:
    """Begins a task's transaction: in the snapshot, if there is one, and with fixed formats of text.

    Args:
        cursor: Of psycopg or of ADBC, in a new transaction.
        snapshot: Its name.

    Raises:
        SnapshotLost: The snapshot is gone.
    """
    if snapshot is not None:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        import_snapshot(cursor, snapshot)
    cursor.execute(FIX_FORMATS.decode())
    cursor.fetchall()
