"""A query or a name reaches Postgres from ``penstock.table`` as it was written, divided between tasks or not.

The reader runs here without Spark, which does not see the query.
"""

import json
from typing import Any

import pytest

from fixtures.selects import OPTIONS, SELECTS, Case, create_items
from penstock.database.connections import Connection
from penstock.database.query_text import query_text
from penstock.spark import snapshot
from penstock.spark.sources.table_reader import TableDataSource

pytestmark = pytest.mark.slow  # a hundred tasks, each with its own connections


def read(database_url: str, **options: str) -> tuple[list[list[Any]], int]:
    """The rows that Spark reads, in the order in which it calls the source; and the number of tasks."""
    source = TableDataSource({"databaseUrl": database_url, **options})
    reader = source.reader(source.schema())
    parts = reader.partitions()
    return [[*row.values()] for part in parts for batch in reader.read(part) for row in batch.to_pylist()], len(parts)


def as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("case", SELECTS.values(), ids=SELECTS.keys())
def test_a_query_is_read_as_it_was_written(connection: Connection, database_url: str, case: Case) -> None:
    create_items(connection)
    query = case.query if isinstance(case.query, str) else query_text(case.query)

    with snapshot(database_url) as name:
        whole, _ = read(database_url, query=query, columns="id,v")
        divided, _ = read(
            database_url, query=query, columns="id,v", snapshot=name, partitionColumn="id", partitions="3"
        )

    rows = {number: as_text(value) for number, value in whole}
    assert rows == dict(enumerate(case.values, 1))
    assert sorted(map(str, divided)) == sorted(map(str, whole))


NAMES = ["a%", "%s", "%(x)s", "%%", "a b", "a;b", "a--b", 'a"b', "a'b", "a:b", "a\\b", "{}", "$1", "é", "A"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_read_as_it_is_written(connection: Connection, database_url: str, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    connection.execute(f"CREATE TABLE public.{quoted} AS SELECT i AS {quoted} FROM generate_series(1, 9) i".encode())
    given = {"table": json.dumps(["public", name]), "columns": json.dumps([name]), "where": f"{quoted} % 2 = 1 -- %;"}

    with snapshot(database_url) as at:
        by_place, _ = read(database_url, **given, snapshot=at)
        by_value, tasks = read(database_url, **given, snapshot=at, partitionColumn=name, partitions="3")

    assert sorted(by_place) == sorted(by_value) == [[1], [3], [5], [7], [9]]
    assert tasks == 3


@pytest.mark.parametrize("options", OPTIONS)
def test_options_are_read_as_they_are_without_spark(
    connection: Connection, database_url: str, options: dict[str, str]
) -> None:
    create_items(connection)

    for source in ({"table": "public.items"}, {"query": "TABLE public.items; -- all"}):
        assert read(database_url, **source, **options)[0] == [[1, 1]]
