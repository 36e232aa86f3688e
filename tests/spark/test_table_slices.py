"""What Postgres does for ``penstock.table``: slices, and its connections' name."""

from typing import Any

import pytest

from penstock.database.connections import Connection
from penstock.spark import snapshot
from penstock.spark.sources import table_reader
from penstock.spark.sources.table_reader import TableDataSource, TableReader


def make_reader(database_url: str, **options: str) -> TableReader:
    given = {"databaseUrl": database_url, "table": "public.kinds"}
    source = TableDataSource({**given, **options})
    reader = source.reader(source.schema())
    assert isinstance(reader, TableReader)
    return reader


class Recorded:
    """A connection that keeps the text of its statements."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.statements: list[str] = []

    def execute(self, statement: Any, *values: Any) -> Any:
        self.statements.append(statement.decode() if isinstance(statement, bytes) else statement)
        return self._connection.execute(statement, *values)


def test_slices_by_a_column_take_one_sort_of_a_sample(
    connection: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_reader, "SAMPLE_BYTES", 500_000)
    connection.execute(
        "CREATE TABLE public.kinds AS SELECT i AS whole, md5(i::text) AS name FROM generate_series(1, 30000) i"
    )
    with snapshot(database_url) as name:
        reader = make_reader(database_url, partitionColumn="name", partitions="5", snapshot=name, where="whole % 2 = 0")
        spied = Recorded(connection)
        edges = table_reader._find_edges(spied, reader._relation, "name", 5)
        counts = [sum(b.num_rows for b in reader.read(p)) for p in reader.partitions()]

    sorts = [text for text in spied.statements if "ORDER BY name" in text]
    assert ["TABLESAMPLE SYSTEM" in text for text in sorts] == [True]
    assert (len(edges), edges) == (4, sorted(edges))
    assert sum(counts) == 15_000
    assert len(counts) == 5
    assert min(counts) > 1500


def test_its_connections_have_a_name(database_url: str) -> None:
    query = "SELECT current_setting('application_name') AS name"
    source = TableDataSource({"databaseUrl": database_url, "query": query})
    reader = source.reader(source.schema())
    [part] = reader.partitions()

    [batch] = list[Any](reader.read(part))

    assert batch.column("name").to_pylist() == ["penstock spark"]
