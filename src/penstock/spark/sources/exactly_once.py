"""Effects of micro-batches that happen once: in Postgres, a row per query says which one was the last.

    CREATE TABLE spark_batches (name text PRIMARY KEY, query text NOT NULL, batch bigint NOT NULL)

The row is locked, compared and updated in the transaction of the effects.  Spark repeats a micro-batch with the same number
after any failure, so that a number that was reached before says that the effects are there.

Another sink may commit its last offset of each shard with the records.  Offsets have no holes, so that offset says which
records it has, whatever Spark knows: ``new_records`` gives the others.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from penstock.database.connections import Connection, TableConnection, connect_postgres
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import quote
from penstock.errors import Fenced, Gap, InvalidSetting
from penstock.records import ShardName
from penstock.spark.sources.record_columns import split_shards

log = logging.getLogger("penstock.spark")

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
    """Creates the table of micro-batches if it is not there."""
    name = quote(*table.split("."))
    [(known,)] = connection.execute("SELECT to_regclass(%s)", (name,)).fetchall()
    if known is None:
        # Another query may create it at the same time.
        with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {name} (name text PRIMARY KEY, query text NOT NULL, batch bigint NOT NULL)".encode()
            )


def claim(connection: Connection, table: str, name: str, query: str, batch: int, *, consecutive: bool) -> bool:
    """True if a micro-batch is due in the connection's transaction, which then says that it was the last."""
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


PLACE = ("channel", "shard", "offset")


def new_records(rows: pa.Table, position: Callable[[str], int | None]) -> dict[str, pa.Table]:
    """The records of a micro-batch that a sink does not have yet, of each shard, in the order of their offsets.

        def write(frame, batch):
            table = DeltaTable("rides")
            new = new_records(frame.toArrow(), table.transaction_version)
            last = [Transaction(shard, rows["offset"][-1].as_py()) for shard, rows in new.items()]
            if new:
                commit = CommitProperties(app_transactions=last)
                write_deltalake(table, pa.concat_tables(new.values()), mode="append", commit_properties=commit)

    Args:
        rows: All records of the micro-batch, with ``channel``, ``shard`` and ``offset``: filter them afterwards.
        position: The last offset that the sink has of a shard, which it is given as ``rides/0``; None if it has no record of it.

    Raises:
        Gap: Records between the sink's last one and these are missing, or records among them; nothing is to be written.
        InvalidSetting: A column is missing.
    """
    missing = [name for name in PLACE if name not in rows.column_names]
    if missing:
        raise InvalidSetting(f"new_records: the rows have no column {missing[0]!r}; it needs {', '.join(PLACE)}")
    ordered = rows.sort_by([(name, "ascending") for name in PLACE])
    new = {str(shard): _continue(shard, of, position(str(shard))) for shard, of in split_shards(ordered)}
    if known := rows.num_rows - sum(each.num_rows for each in new.values()):
        log.warning("the sink has %d of %d records already", known, rows.num_rows)
    return {shard: each for shard, each in new.items() if each.num_rows}


def _continue(shard: ShardName, rows: pa.Table, last: int | None) -> pa.Table:
    """The rows after ``last``, which are the next ones."""
    new = rows if last is None else rows.filter(pc.greater(rows["offset"], last))
    if not new.num_rows:
        return new
    first, end = new["offset"][0].as_py(), new["offset"][-1].as_py()
    found = (
        f"{shard}: the sink {'has no record' if last is None else f'ends at offset {last}'}, and this micro-batch has "
        f"{new.num_rows:,} of offsets {first} to {end}"
    )
    if last is not None and first != last + 1:
        raise Gap(f"{found}. Read on from where the sink ends: a new checkpointLocation, and startingOffsets")
    if not end - first + 1 == new.num_rows == pc.count_distinct(new["offset"]).as_py():
        raise Gap(f"{found}. Give new_records all records of the micro-batch, each once, and filter the result")
    return new
