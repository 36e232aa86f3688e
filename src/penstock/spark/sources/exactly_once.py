"""Micro-batches whose effects in Postgres happen once: a row per query says which one was the last.

    CREATE TABLE spark_batches (name text PRIMARY KEY, query text NOT NULL, batch bigint NOT NULL)

The row is locked, compared and updated in the transaction of the effects.  Spark repeats a micro-batch with the same number
after any failure, so that a number that was reached before says that the effects are there.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg
from pyspark.sql import DataFrame

from penstock.database.connections import Connection, TableConnection, connect_postgres
from penstock.database.errors import postgres_errors
from penstock.database.statements import quote
from penstock.errors import Fenced, Gap, InvalidSetting

DEFAULT_TABLE = "spark_batches"
QUERY_ID = "sql.streaming.queryId"
"""Spark's local property with the id that a query keeps in its checkpoint."""


@contextmanager
def once(
    database_url: str, name: str, frame: DataFrame, batch: int, *, table: str = DEFAULT_TABLE, query: str | None = None
) -> Iterator[Connection | None]:
    """A transaction for the effects of a micro-batch in ``foreachBatch``; None if they are there already.

        def write(frame, batch):
            rows = [(row.day, row.fares) for row in frame.collect()]
            with once(database_url, "fares", frame, batch) as connection:
                if connection is not None:
                    connection.cursor().executemany("INSERT INTO fares VALUES (%s, %s)", rows)

    Call it for every micro-batch, also for an empty one: a number that is left out is reported as lost.

    Args:
        database_url: Where the effects are.
        name: Of the query; the effects of one name belong to one checkpoint directory.
        frame: The micro-batch.
        batch: Its number.
        table: Where the last number of each name is kept; it is created if it is not there.
        query: Id of the query; needed in Spark Connect only, which does not show it to the function.

    Raises:
        Fenced: Another query has written under this name: the checkpoint directory is new, or there are two queries.
        Gap: The micro-batch before was never written here: the database is older than the checkpoint directory.
        InvalidSetting: The id of the query is not known.
        ServerUnavailable: Postgres does not answer.
    """
    query = query or _find_query(frame)
    with connect_postgres(database_url, application=f"spark {name}", kind=TableConnection) as connection:
        with postgres_errors(f"writing micro-batch {batch} of {name}"):
            create_table(connection, table)
        with connection.transaction():
            due = claim(connection, table, name, query, batch, consecutive=True)
            yield connection if due else None


def _find_query(frame: DataFrame) -> str:
    try:
        query = frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
    except Exception as error:  # Spark Connect has no context
        raise InvalidSetting("once: Spark Connect does not show the query's id; give query=…") from error
    if not query:
        raise InvalidSetting("once: call it in the function of foreachBatch, or give query=…")
    return query


def create_table(connection: Connection, table: str) -> None:
    """Creates the table of micro-batches if it is not there.

    Raises:
        psycopg.Error: The server's errors.
    """
    name = quote(*table.split("."))
    [(known,)] = connection.execute("SELECT to_regclass(%s)", (name,)).fetchall()
    if known is None:
        # Another query may create it at the same time.
        with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {name} (name text PRIMARY KEY, query text NOT NULL, batch bigint NOT NULL)".encode()
            )


def claim(connection: Connection, table: str, name: str, query: str, batch: int, *, consecutive: bool) -> bool:
    """Whether a micro-batch is due in the connection's transaction, which then says that it was the last.

    Raises:
        Fenced: Another query has written under this name.
        Gap: With ``consecutive``, the micro-batch before was never written.
        psycopg.Error: The server's errors.
    """
    where = quote(*table.split("."))
    connection.execute(
        f"INSERT INTO {where} (name, query, batch) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING".encode(),
        (name, query, batch - 1),
    )
    [(owner, last)] = connection.execute(
        f"SELECT query, batch FROM {where} WHERE name = %s FOR UPDATE".encode(), (name,)
    ).fetchall()
    if owner != query:
        raise Fenced(
            f"{name}: query {owner} has written up to micro-batch {last}, this is query {query}: its checkpoint directory is new, "
            f"and its effects would be doubled. Give it a name of its own, or remove the effects and this row: DELETE FROM {where} "
            f"WHERE name = '{name}'"
        )
    if batch <= last:
        return False
    if consecutive and batch > last + 1:
        raise Gap(
            f"{name}: micro-batch {batch} follows {last}: those between were never written here. The database is older than the "
            "checkpoint directory, or they were left out: call once for every micro-batch"
        )
    connection.execute(f"UPDATE {where} SET batch = %s WHERE name = %s".encode(), (batch, name))
    return True
