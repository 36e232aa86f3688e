"""Effects of micro-batches that happen once: a row per query in Postgres names the last one.

    CREATE TABLE spark_batches (kind text, name text, query text NOT NULL, batch bigint NOT NULL,
                                content text NOT NULL, ends text NOT NULL, PRIMARY KEY (kind, name))

The row is locked, compared and updated in the transaction of the effects.  After any failure Spark
repeats its last micro-batch, with the same number and content: its effects are there.  A checkpoint
directory that was restored or copied gives out numbers again for other content: what follows from a
number alone would be a loss.

Another sink may commit its last offset of each shard with the records.  Offsets have no holes, so
that offset says which records it has, whatever Spark knows: ``new_records`` gives the others.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from penstock.database.connections import Connection, TableConnection, connect_postgres
from penstock.database.driver_errors import postgres_errors
from penstock.database.statements import quote
from penstock.errors import Fenced, Gap, InvalidSetting
from penstock.records import ShardName
from penstock.spark.sources.batch_content import (
    QUERY_ID,
    BatchContent,
    find_content,
    local_property,
)
from penstock.spark.sources.record_columns import split_shards

log = logging.getLogger("penstock.spark")

DEFAULT_TABLE = "spark_batches"
_COLUMNS = (
    "kind text, name text, query text NOT NULL, batch bigint NOT NULL, content text NOT NULL, ends "
    "text NOT NULL, "
    "PRIMARY KEY (kind, name)"
)
_SHOWN_ENDS = 500
"""Limit of characters of an error's offsets; the table has all."""


@contextmanager
def once(
    database_url: str,
    name: str,
    frame: DataFrame,
    batch: int,
    *,
    table: str = DEFAULT_TABLE,
    query: str | None = None,
) -> Iterator[Connection | None]:
    """Opens a transaction for the effects of a micro-batch; yields None if they are there already.

        def write(frame, batch):
            rows = [(row.day, row.fares) for row in frame.collect()]
            with once(database_url, "fares", frame, batch) as connection:
                if connection is not None:
                    connection.cursor().executemany("INSERT INTO fares VALUES (%s, %s)", rows)

    Call it for every micro-batch, also for an empty one: a number that is left out is reported as
    lost.

    Args:
        database_url: Where the effects are.
        name: Of the query; the effects of one name belong to one checkpoint directory.
        frame: The micro-batch.
        batch: Its number.
        table: Where the last number of each name is kept; it is created if it is not there.
        query: Id of the query; needed in Spark Connect only, which does not show it to the
            function.  The content of the micro-batch is then a digest of its rows, which are read
            once more.

    Raises:
        Fenced: Another query has written under this name, or the checkpoint directory was restored
            or copied: its number was given to another micro-batch.
        Gap: The micro-batch before was never written here: the database is older than the
            checkpoint directory.
        InvalidSetting: The id of the query is not known.
        ServerUnavailable: Postgres does not answer.
    """
    query = query or _find_query(frame)
    due = DueBatch("once", name, query, batch, find_content(frame, batch))
    with connect_postgres(
        database_url, application=f"spark {name}", kind=TableConnection
    ) as connection:
        with postgres_errors(f"writing micro-batch {batch} of {name}"):
            create_table(connection, table)
        with connection.transaction():
            yield connection if claim(connection, table, due) else None


def _find_query(frame: DataFrame) -> str:
    query = local_property(frame, QUERY_ID)
    if not query:
        raise InvalidSetting(
            "once: the id of the query is not known: call it in the function of foreachBatch, or "
            "give query=…, as in Spark Connect"
        )
    return query


def create_table(connection: Connection, table: str) -> None:
    """Creates the table of micro-batches if it does not exist."""
    name = quote(*table.split("."))
    [(existing,)] = connection.execute("SELECT to_regclass(%s)", (name,)).fetchall()
    if existing is None:
        # Another query may create it at the same time.
        with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
            connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({_COLUMNS})".encode())


@dataclass(frozen=True, slots=True)
class DueBatch:
    """A micro-batch whose effects are due, unless they are there."""

    kind: str  # of the effects, ``once`` or ``staged``: names of the two are apart
    name: str
    query: str
    batch: int
    content: BatchContent


def claim(connection: Connection, table: str, due: DueBatch) -> bool:
    """Returns whether a micro-batch is due in the connection's transaction.

    The transaction then notes that it was the last.
    """
    quoted, place = quote(*table.split(".")), (due.kind, due.name)
    connection.execute(
        f"""
        INSERT INTO {quoted} (kind, name, query, batch, content, ends)
        VALUES (%s, %s, %s, %s, '', '')
        ON CONFLICT DO NOTHING
        """.encode(),
        (*place, due.query, due.batch - 1),
    )
    [(query, last, content, stored_ends)] = connection.execute(
        f"""
        SELECT query, batch, content, ends FROM {quoted} WHERE kind = %s AND name = %s FOR UPDATE
        """.encode(),
        place,
    ).fetchall()
    if query == due.query and due.batch == last and due.content.digest == content:
        return False
    if query != due.query or due.batch <= last:
        raise _fenced(due, query, last, stored_ends)
    if due.batch > last + 1:
        raise Gap(
            f"{due.name}: micro-batch {due.batch} follows {last}: those between were never written "
            "here. The database is older than "
            "the checkpoint directory, or they were left out: call once for every micro-batch"
        )
    connection.execute(
        f"""
        UPDATE {quoted} SET batch = %s, content = %s, ends = %s WHERE kind = %s AND name = %s
        """.encode(),
        (due.batch, due.content.digest, due.content.ends, *place),
    )
    return True


def _fenced(due: DueBatch, query: str, last: int, stored_ends: str) -> Fenced:
    """Returns the error for a query that has not written the effects that are there.

    Continuing under the name would lose records, or double effects.
    """
    written = f"{due.name}: query {query} has written up to micro-batch {last}"
    if query != due.query:
        now = f"this is query {due.query}"
        remedy = "If they are two queries, give this one a name of its own. If"
    elif due.batch < last:
        now, remedy = f"now it comes with {due.batch}", "If"
    else:
        now, remedy = "now it comes with other content", "If"
    start = (
        f"startingOffsets {stored_ends}"
        if 0 < len(stored_ends) <= _SHOWN_ENDS
        else "startingOffsets where that micro-batch ends"
    )
    return Fenced(
        f"{written}; {now}. Nothing was written. {remedy} its checkpoint directory was deleted, "
        "restored or copied, or the query changed, continue after the last effect: a new name, a "
        f"new checkpointLocation, and {start}"
    )


PLACE = ("channel", "shard", "offset")


def new_records(rows: pa.Table, position: Callable[[str], int | None]) -> dict[str, pa.Table]:
    """Returns the records of a micro-batch that a sink lacks, by shard, in the order of offsets.

        def write(frame, batch):
            table = DeltaTable("rides")
            new = new_records(frame.toArrow(), table.transaction_version)
            last = [Transaction(shard, rows["offset"][-1].as_py()) for shard, rows in new.items()]
            if new:
                commit = CommitProperties(app_transactions=last)
                rows = pa.concat_tables(new.values())
                write_deltalake(table, rows, mode="append", commit_properties=commit)

    Args:
        rows: All records of the micro-batch, with ``channel``, ``shard`` and ``offset``: filter
            them afterwards.
        position: The last offset that the sink has of a shard, which it is given as ``rides/0``;
            None if it has no record of it.

    Raises:
        Gap: Records between the sink's last one and these are missing, or records among them;
            nothing is to be written.
        InvalidSetting: A column is missing.
    """
    missing = [name for name in PLACE if name not in rows.column_names]
    if missing:
        raise InvalidSetting(
            f"new_records: the rows have no column {missing[0]!r}; it needs {', '.join(PLACE)}"
        )
    ordered = rows.sort_by([(name, "ascending") for name in PLACE])
    new = {
        str(shard): _continue(shard, shard_rows, position(str(shard)))
        for shard, shard_rows in split_shards(ordered)
    }
    if present := rows.num_rows - sum(fresh.num_rows for fresh in new.values()):
        log.warning("the sink has %d of %d records already", present, rows.num_rows)
    return {shard: fresh for shard, fresh in new.items() if fresh.num_rows}


def _continue(shard: ShardName, rows: pa.Table, last: int | None) -> pa.Table:
    """Returns the rows after ``last``, which are the next ones."""
    new = rows if last is None else rows.filter(pc.greater(rows["offset"], last))
    if not new.num_rows:
        return new
    first, end = new["offset"][0].as_py(), new["offset"][-1].as_py()
    finding = (
        f"{shard}: the sink {'has no record' if last is None else f'ends at offset {last}'}, and "
        "this micro-batch has "
        f"{new.num_rows:,} of offsets {first} to {end}"
    )
    if last is not None and first != last + 1:
        raise Gap(
            f"{finding}. Read on from where the sink ends: a new checkpointLocation, and "
            "startingOffsets"
        )
    if not end - first + 1 == new.num_rows == pc.count_distinct(new["offset"]).as_py():
        raise Gap(
            f"{finding}. Give new_records all records of the micro-batch, each once, and filter "
            "the result"
        )
    return new
