"""Spark reads a table, and compares two: beside Postgres alone, and beside rows that pass through Python one by one."""

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.application import one, total_in_bulk
from benchmarks.backlogs import Scale
from benchmarks.cases.spark.epochs import CORES
from benchmarks.cases.spark.session import count_rows, get_session
from benchmarks.measuring import Case, Figures, NotMeasured
from benchmarks.servers import BenchServers
from penstock.database.connections import Connection
from penstock.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_A_RECORD = 50
"""A full run reads a table of five million rows."""

KEYS_A_RECORD = 10

_COLUMNS = "id long, cents long, status string, at timestamp"

_TABLE = """
CREATE TABLE bench.trips AS
SELECT n AS id, n * 7 %% 100000 AS cents, 'paid' AS status, now() - n * interval '1 s' AS at
FROM generate_series(1, %(rows)s::bigint) n;
"""

_TWO = """
CREATE TABLE bench.canonical AS
SELECT n AS id, n * 7 %% 100000 AS cents FROM generate_series(1, %(rows)s::bigint) n;
CREATE TABLE bench.state AS TABLE bench.canonical;
UPDATE bench.state SET cents = cents + 1 WHERE id %% 1000 = 0;
"""

_DIFFERENCES = """
SELECT count(*)
FROM bench.canonical c
FULL JOIN bench.state s USING (id)
WHERE c.cents IS DISTINCT FROM s.cents
"""


def make_cases(servers: BenchServers, scale: Scale) -> list[Case]:
    """Reading a table, and comparing two."""
    rows, keys = scale.records * ROWS_A_RECORD, scale.records * KEYS_A_RECORD
    return [
        Case(
            name="spark-table",
            unit="rows/s",
            sentence=f"penstock.table reads {rows:,} rows of four columns into Spark",
            ours=lambda: _measure_reading(servers, rows, _read_by_penstock),
            limits={"copy": lambda: _measure_reading(servers, rows, _read_by_copy)},
            peers={
                "createDataFrame": lambda: _measure_reading(servers, rows, _read_by_create_data_frame),
                "tuples into Spark": lambda: _measure_reading(servers, rows, _read_by_tuples_into_spark),
                "tuples, no Spark": lambda: _measure_reading(servers, rows, _read_by_tuples),
            },
            slow=True,
            rounds=scale.few_rounds,
        ),
        *(
            Case(
                name=f"spark-compare-{cores}",
                unit="keys/s",
                sentence=f"a reconciliation compares {keys:,} keys; one in a thousand differs, {cores} parallel tasks",
                ours=partial(_measure_comparison, servers, keys, cores, _compare_by_spark),
                limits={"full join": partial(_measure_comparison, servers, keys, cores, _compare_by_join)},
                slow=True,
                rounds=scale.few_rounds,
            )
            for cores in CORES
        ),
    ]


def _measure_reading(servers: BenchServers, rows: int, read: Callable[[BenchServers, str], int]) -> Figures:
    url = _fill(servers, "trips", _TABLE, rows)
    get_session(servers)  # started, and idle, while the other contestants read
    began = perf_counter()
    found = read(servers, url)
    took = perf_counter() - began
    if found != rows:
        raise NotMeasured(f"{found} of {rows} rows were read")
    return {"": rows / took}


def _fill(servers: BenchServers, name: str, tables: str, rows: int) -> str:
    def fill(connection: Connection) -> None:
        for statement in filter(str.strip, tables.split(";")):
            connection.execute(statement.encode(), {"rows": rows})
        connection.execute("VACUUM ANALYZE")

    return servers.database(name, fill)


def _read_by_penstock(servers: BenchServers, url: str) -> int:
    session = get_session(servers)
    from penstock.spark import snapshot  # noqa: PLC0415  an optional dependency

    with snapshot(url) as name:
        source = session.read.format("penstock.table").options(databaseUrl=url, table="bench.trips", snapshot=name)
        return count_rows(source.load())


def _read_by_copy(servers: BenchServers, url: str) -> int:
    with servers.postgres(url) as connection, connection.cursor() as cursor:
        with cursor.copy("COPY bench.trips TO STDOUT (FORMAT binary)") as copy:
            for _ in copy:
                pass
        return cursor.rowcount


def _read_by_tuples(servers: BenchServers, url: str) -> int:
    with servers.postgres(url) as connection, connection.transaction():
        return sum(1 for _ in _fetch_tuples(connection, "true"))


def _fetch_tuples(connection: Any, condition: str) -> Iterator[tuple[Any, ...]]:
    with connection.cursor(name="bench") as cursor:
        cursor.itersize = 10_000
        cursor.execute(f"SELECT * FROM bench.trips WHERE {condition}".encode())
        yield from cursor


def _read_by_create_data_frame(servers: BenchServers, url: str) -> int:
    """As a program with a cursor and a session does it: all rows pass through the driver, one by one."""
    with servers.postgres(url) as connection, connection.transaction():
        rows = list(_fetch_tuples(connection, "true"))
    return count_rows(get_session(servers).createDataFrame(rows, _COLUMNS))


def _read_by_tuples_into_spark(servers: BenchServers, url: str) -> int:
    import psycopg  # noqa: PLC0415  for the task
    from pyspark.sql.datasource import (  # noqa: PLC0415  an optional dependency
        DataSource,
        DataSourceReader,
        InputPartition,
    )

    fetch_tuples = _fetch_tuples

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(4)]

        def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
            with psycopg.connect(url, autocommit=True) as c, c.transaction():
                yield from fetch_tuples(c, f"id % 4 = {partition.value}")

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "bench.tuples"

        def schema(self) -> str:
            return _COLUMNS

        def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002  Spark's signature
            return Reader()

    spark = get_session(servers)
    spark.dataSource.register(Source)
    return count_rows(spark.read.format("bench.tuples").load())


def _measure_comparison(
    servers: BenchServers, keys: int, cores: int, compare: Callable[["SparkSession", BenchServers, str], int]
) -> Figures:
    url = _fill(servers, "compared", _TWO, keys)
    spark = get_session(servers, cores)
    compare(spark, servers, url)  # the first one takes twice as long
    began = perf_counter()
    found = compare(spark, servers, url)
    took = perf_counter() - began
    if found != keys // 1000:
        raise NotMeasured(f"{found} differences were found, {keys // 1000} were made")
    return {"": keys / took}


def _compare_by_spark(spark: "SparkSession", servers: BenchServers, url: str) -> int:
    with servers.postgres(url) as connection, connection.transaction():
        from penstock.spark.reconcile.spark_comparer import SparkComparer  # noqa: PLC0415  an optional dependency

        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        [(snapshot,)] = connection.execute("SELECT pg_export_snapshot()")
        pipeline = Pipeline(one.channels.values())
        channel: Any = next(iter(one.channels.values()))
        pipeline.consumer(reads=channel, name="state")(total_in_bulk)
        pipeline.reconciliation(of="state", state="bench.state", key="id")(lambda tables: tables("bench.canonical"))
        comparer = SparkComparer(spark, url)
        spec = pipeline.get_reconciliation("state")
        return comparer.compare(spec, snapshot, snapshot).total


def _compare_by_join(_: "SparkSession", servers: BenchServers, url: str) -> int:
    with servers.postgres(url) as connection:
        [(found,)] = connection.execute(_DIFFERENCES)
        return int(found)
