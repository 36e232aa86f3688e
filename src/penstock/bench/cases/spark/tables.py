"""Spark reads a table, and compares two: beside Postgres alone, and beside rows that go through Python one by one."""

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.bench.application import one, total_in_bulk
from penstock.bench.cases.spark.epochs import CORES
from penstock.bench.cases.spark.session import session, swallowed
from penstock.bench.measuring import Case, NotMeasured, Sample
from penstock.bench.plant import Plant, Scale
from penstock.database.connections import Connection
from penstock.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_A_RECORD = 50
"""So that a full run reads a table of five million rows."""

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


def cases(plant: Plant, scale: Scale) -> list[Case]:
    """Reading, and comparing."""
    rows, keys = scale.records * ROWS_A_RECORD, scale.records * KEYS_A_RECORD
    return [
        Case(
            name="spark-table",
            unit="rows/s",
            sentence=f"penstock.table reads {rows:,} rows of four columns into Spark",
            ours=lambda: _read(plant, rows, _by_penstock),
            limits={"copy": lambda: _read(plant, rows, _by_copy)},
            peers={
                "createDataFrame": lambda: _read(plant, rows, _by_create_data_frame),
                "tuples into Spark": lambda: _read(plant, rows, _by_tuples_into_spark),
                "tuples, no Spark": lambda: _read(plant, rows, _by_tuples),
            },
            slow=True,
            rounds=scale.few_rounds,
        ),
        *(
            Case(
                name=f"spark-compare-{cores}",
                unit="keys/s",
                sentence=f"a reconciliation compares {keys:,} keys, of which one in a thousand differs, {cores} tasks at once",
                ours=partial(_compared, plant, keys, cores, _by_spark),
                limits={"full join": partial(_compared, plant, keys, cores, _by_join)},
                slow=True,
                rounds=scale.few_rounds,
            )
            for cores in CORES
        ),
    ]


def _read(plant: Plant, rows: int, read: Callable[[Plant, str], int]) -> Sample:
    url = _filled(plant, "trips", _TABLE, rows)
    session(plant)  # whoever reads: it is started, and at rest, while the others are measured
    began = perf_counter()
    found = read(plant, url)
    took = perf_counter() - began
    if found != rows:
        raise NotMeasured(f"{found} of {rows} rows were read")
    return {"": rows / took}


def _filled(plant: Plant, name: str, tables: str, rows: int) -> str:
    def fill(connection: Connection) -> None:
        for statement in filter(str.strip, tables.split(";")):
            connection.execute(statement.encode(), {"rows": rows})
        connection.execute("VACUUM ANALYZE")

    return plant.database(name, fill)


def _by_penstock(plant: Plant, url: str) -> int:
    source = (
        session(plant).read.format("penstock.table").options(databaseUrl=url, table="bench.trips")
    )
    return swallowed(source.load())


def _by_copy(plant: Plant, url: str) -> int:
    with plant.postgres(url) as connection, connection.cursor() as cursor:
        with cursor.copy("COPY bench.trips TO STDOUT (FORMAT binary)") as copy:
            for _ in copy:
                pass
        return cursor.rowcount


def _by_tuples(plant: Plant, url: str) -> int:
    with plant.postgres(url) as connection, connection.transaction():
        return sum(1 for _ in _tuples(connection, "true"))


def _tuples(connection: Any, condition: str) -> Iterator[tuple[Any, ...]]:
    with connection.cursor(name="bench") as cursor:
        cursor.itersize = 10_000
        cursor.execute(f"SELECT * FROM bench.trips WHERE {condition}".encode())
        yield from cursor


def _by_create_data_frame(plant: Plant, url: str) -> int:
    """As a program does it that has a cursor and a session: all rows pass the driver, one by one."""
    with plant.postgres(url) as connection, connection.transaction():
        rows = list(_tuples(connection, "true"))
    return swallowed(session(plant).createDataFrame(rows, _COLUMNS))


def _by_tuples_into_spark(plant: Plant, url: str) -> int:
    from pyspark.sql.datasource import (  # noqa: PLC0415  only Spark's cases need it
        DataSource,
        DataSourceReader,
        InputPartition,
    )

    from penstock.database.connections import connect_postgres  # noqa: PLC0415  for the task

    tuples = _tuples

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(4)]

        def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
            with connect_postgres(url, application="bench") as c, c.transaction():
                yield from tuples(c, f"id % 4 = {partition.value}")

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "bench.tuples"

        def schema(self) -> str:
            return _COLUMNS

        def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002  Spark's
            return Reader()

    spark = session(plant)
    spark.dataSource.register(Source)
    return swallowed(spark.read.format("bench.tuples").load())


def _compared(
    plant: Plant, keys: int, cores: int, compare: Callable[["SparkSession", Plant, str], int]
) -> Sample:
    url = _filled(plant, "compared", _TWO, keys)
    spark = session(plant, cores)
    compare(spark, plant, url)  # the first one takes twice as long
    began = perf_counter()
    found = compare(spark, plant, url)
    took = perf_counter() - began
    if found != keys // 1000:
        raise NotMeasured(f"{found} differences were found, {keys // 1000} were planted")
    return {"": keys / took}


def _by_spark(spark: "SparkSession", plant: Plant, url: str) -> int:
    with plant.postgres(url) as connection, connection.transaction():
        from penstock.spark.reconcile import SparkComparer  # noqa: PLC0415  needs Spark

        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        [(snapshot,)] = connection.execute("SELECT pg_export_snapshot()")
        pipeline = Pipeline(one.channels.values())
        channel: Any = next(iter(one.channels.values()))
        pipeline.consumer(reads=channel, name="state")(total_in_bulk)
        pipeline.reconciliation(of="state", state="bench.state", key="id")(
            lambda tables: tables("bench.canonical")
        )
        comparer = SparkComparer(spark, url)
        spec = pipeline.get_reconciliation("state")
        return comparer.compare(spec, snapshot, snapshot).total


def _by_join(_: "SparkSession", plant: Plant, url: str) -> int:
    with plant.postgres(url) as connection:
        [(found,)] = connection.execute(_DIFFERENCES)
        return int(found)
