"""The application's tables, for canonical functions."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import Select
from sqlalchemy.dialects import postgresql

from penstock import errors
from penstock.database.statements import quote
from penstock.declaring.declarations import table_named
from penstock.spark.sources.table_reader import reading

ROW_BYTES = 24
"""What a row takes besides its values."""


class Tables:
    """The application's tables in the snapshot of a cut: the argument of ``canonical(tables)``."""

    def __init__(self, spark: SparkSession, database_url: str, snapshot: str) -> None:
        self.spark = spark
        self._options = {"databaseUrl": database_url, "snapshot": snapshot}
        self._read_from: list[str] = []

    def estimate_bytes(self) -> int:
        """Size of the tables and queries that were read so far, by Postgres' statistics."""
        with reading(self._options["databaseUrl"], self._options["snapshot"]) as connection:
            return sum(_estimate(connection, source) for source in self._read_from)

    def __call__(self, table: Any, **options: str) -> DataFrame:
        """A table, given as a mapped class, a ``Table`` or a name; the options are those of ``penstock.table``."""
        schema, name = table_named(table)
        self._read_from.append(quote(schema, name))
        return self._read(table=json.dumps([*filter(None, [schema]), name]), **options)

    def query(self, query: "str | Select[Any]", **options: str) -> DataFrame:
        """The result of a query, given as text or as SQLAlchemy's ``select``; Postgres can aggregate before rows travel."""
        text = _text(query)
        self._read_from.append(f"({text}\n) AS q")
        return self._read(query=text, **options)

    def _read(self, **options: str) -> DataFrame:
        return self.spark.read.format("penstock.table").options(**self._options, **options).load()


@contextmanager
def task_errors() -> Iterator[None]:
    """Raises Penstock's errors from tasks and planners again as what they were; Spark passes them on as text."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:  # the second for rows fetched in slices
        for name, message in re.findall(r"penstock\.errors\.(\w+): (.*)", str(error)):
            raise errors.from_wire(name, message) from error
        raise


def _estimate(connection: Any, source: str) -> int:
    """Bytes of the rows of a table or query, as Postgres expects them; what it keeps beside a table's rows counts, too."""
    [(explained,)] = connection.execute(f"EXPLAIN (FORMAT JSON) SELECT * FROM {source}".encode())
    plan = explained[0]["Plan"]
    rows = plan["Plan Rows"] * (plan["Plan Width"] + ROW_BYTES)
    if source.startswith("("):
        return int(rows)
    [(size,)] = connection.execute("SELECT pg_catalog.pg_table_size(%s::regclass)", (source,))
    return int(max(rows, size))


def _text(query: "str | Select[Any]") -> str:
    if isinstance(query, str):
        return query.strip().rstrip(";")
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]  # untyped in SQLAlchemy
    return str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
