"""Effects of micro-batches that happen once: in tables of one's own, and as staged records."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  the usual name
from pyspark.sql.types import LongType, StringType, StructType

from fixtures.flow import ReadLog
from fixtures.spark import run_to_end
from penstock import Log, Pipeline
from penstock.database.connections import Connection
from penstock.errors import Fenced, Gap, InvalidRecord, InvalidSetting, StagingError, Unknown
from penstock.spark import lag, once
from penstock.spark.releases import HAS_ADMISSION_CONTROL
from penstock.spark.sources.batch_content import BatchContent, combine, digest_texts
from penstock.spark.sources.exactly_once import DueBatch, claim, create_table
from penstock.spark.sources.staged_writer import BatchStager, Encoded, StreamStager, read_rows
from penstock.streaming import Streamer

COLUMNS = StructType()
for _name in ("key", "action", "object", "data", "headers"):
    COLUMNS.add(_name, StringType())


class KilledError(Exception):
    """Ends a query between the commit of an effect and Spark's own."""


def test_a_micro_batch_that_spark_repeats_takes_effect_once(
    spark: SparkSession, where: dict[str, str], connection: Connection, database_url: str, tmp_path: Path
) -> None:
    connection.execute("CREATE TABLE public.effects (id bigint)")
    kills = iter([True, False, True, False, False, False, False, False])

    def write(frame: DataFrame, batch: int) -> None:
        rows = [(row.id,) for row in frame.collect()]
        with once(database_url, "effects", frame, batch) as effects:
            if effects is not None:
                effects.cursor().executemany("INSERT INTO public.effects VALUES (%s)", rows)
        if next(kills):
            raise KilledError

    def run(checkpoint: str) -> Any:
        frame = (
            spark.readStream.format("penstock.log")
            .options(**where, startingOffsets="earliest", maxRecordsPerTrigger="40")
            .load()
        )
        return run_to_end(frame.writeStream.foreachBatch(write), tmp_path / checkpoint)

    for _ in range(2):
        with pytest.raises(Exception, match="KilledError"):
            run("a")
    query = run("a")

    counted = connection.execute("SELECT count(*), count(DISTINCT id) FROM public.effects")
    assert counted.fetchone() == (100, 100)
    assert [each.total for each in lag(query.lastProgress)] == [0][:HAS_ADMISSION_CONTROL]
    with pytest.raises(Exception, match="this is query"):
        run("b")


def due(query: str, batch: int, content: str, kind: str = "once") -> DueBatch:
    return DueBatch(kind, "fares", query, batch, BatchContent(content, '{"rides": {"0": 51}}'))


def test_a_micro_batch_is_due_once_in_order_and_for_one_query(connection: Connection) -> None:
    """Guarantee 44: and by its content, of which the number says nothing."""
    create_table(connection, "batches")
    create_table(connection, "batches")

    written = [
        claim(connection, "batches", due("a", batch, content)) for batch, content in [(7, "x"), (7, "x"), (8, "y")]
    ]

    assert written == [True, False, True]
    for batch, content in [(8, "x"), (8, ""), (7, "x"), (7, "y"), (0, "")]:
        with pytest.raises(Fenced, match=r"a new name, a new checkpointLocation, and startingOffsets .*51"):
            claim(connection, "batches", due("a", batch, content))
    with pytest.raises(Gap, match="micro-batch 10 follows 8"):
        claim(connection, "batches", due("a", 10, "z"))
    with pytest.raises(Fenced, match="give this one a name of its own") as raised:
        claim(connection, "batches", due("b", 9, "z"))
    assert "DELETE" not in str(raised.value), "the row may be another query's, which would double its effects"
    assert claim(connection, "batches", due("b", 0, "z", kind="staged")), "the names of the two kinds are apart"
    assert claim(connection, "batches", due("a", 9, "z"))


def test_a_micro_batch_is_recognised_by_its_rows_where_spark_hides_the_query(
    spark: SparkSession, connection: Connection, database_url: str
) -> None:
    """Guarantee 44."""
    connection.execute("CREATE TABLE public.effects (id bigint)")

    def write(frame: DataFrame, batch: int) -> bool:
        with once(database_url, "x", frame, batch, query="q") as effects:
            return effects is not None

    rows = spark.range(9).selectExpr("id", "map('k', id) AS m", "array(cast(NULL AS date)) AS d", "X'00ff' AS b")

    assert [write(rows, 0), write(rows.repartition(3), 0)] == [True, False]
    for other in (rows.where("id > 0"), rows.union(rows), rows.withColumn("id", F.lit(0)), spark.range(0)):
        with pytest.raises(Fenced, match="with other content"):
            write(other, 0)
    assert write(rows, 1)


def test_the_sink_knows_what_was_planned_if_the_checkpoint_directory_is_a_local_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 44: of rows that are alike, too."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "a b" / "offsets"
    directory.mkdir(parents=True)
    rows = [digest_texts(["a", "b"]), digest_texts(["a"])]

    for checkpoint in (str(directory.parent), f"file:{directory.parent}", f"file://{directory.parent}", "a b"):
        found = []
        for ends in ("5", "6"):
            (directory / "3").write_text(f'v1\n{{"batchTimestampMs": 1}}\n{{"things": {{"0": {ends}}}}}\n-')
            found.append(combine(rows, checkpoint, 3))
            assert combine(reversed(rows), checkpoint, 3) == found[-1], "tasks come in any order"
        assert [each.ends for each in found] == ['{"things": {"0": 5}} -', '{"things": {"0": 6}} -']
        assert found[0].digest != found[1].digest
    elsewhere = [combine(rows, at, 3) for at in (None, "s3a://bucket/a", "hdfs://a/b", "dbfs:/a", "/nowhere")]
    assert {(each.digest, each.ends) for each in elsewhere} == {(f"{sum(rows):x}", "")}


def test_outside_foreach_batch_the_query_is_to_be_given(spark: SparkSession, database_url: str) -> None:
    with (
        pytest.raises(InvalidSetting, match="in the function of foreachBatch"),
        once(database_url, "x", spark.range(1), 0),
    ):
        pass


def test_lag_is_counted_as_kafkas_source_counts_it() -> None:
    latest, end = {"a": {"0": 11, "1": 5}, "b": {"0": 2}}, {"a": {"0": 5, "1": 5}, "b": {"0": 2}}
    ours = {"latestOffset": json.dumps(latest), "endOffset": json.dumps(end)}

    others: tuple[Any, ...] = (
        {"latestOffset": "7", "endOffset": "5"},
        {"latestOffset": '{"a": {}}', "endOffset": '{"a": {}}'},
        {},
    )
    [found] = lag({"sources": [ours, *others]})

    assert (found.min_offsets_behind_latest, found.max_offsets_behind_latest) == (0, 6)
    assert (found.avg_offsets_behind_latest, found.total) == (2, 6)


def test_a_dataframe_is_staged_and_streamed(
    spark: SparkSession, where: dict[str, str], streamer: Streamer, logged: ReadLog, things: Log, tmp_path: Path
) -> None:
    copied = (
        spark.readStream.format("penstock.log")
        .options(**where, startingOffsets="earliest")
        .load()
        .select(
            F.concat(F.lit("copy of "), "key").alias("key"),
            F.lit("copied").alias("action"),
            "object",
            F.struct("id", F.expr("map('x', DATE'2026-11-24', 'y', NULL)").alias("at")).alias("data"),
            F.lit('{"from": "spark"}').alias("headers"),
        )
    )
    target = {"channel": "things", "databaseUrl": where["databaseUrl"]}
    to_staged = copied.writeStream.format("penstock.staged").options(**target)
    run_to_end(to_staged.queryName("copies"), tmp_path)
    streamer.drain()

    records = [r for each in logged(things).values() for r in each if r.action == "copied"]
    assert sorted(r.data["id"] for r in records) == list(range(1, 101))
    assert all(r.data["at"] == {"x": "2026-11-24", "y": None} for r in records)
    assert {(r.object, r.headers["from"]) for r in records if r.headers} == {("thing", "spark")}
    assert all(things.shard_for(r.key) == r.shard for r in records)


def make_writer(where: dict[str, str], schema: StructType = COLUMNS, **options: str) -> Any:
    given = {"channel": "things", "databaseUrl": where["databaseUrl"], **options}
    return StreamStager(given, schema, overwrite=False)


ROW = {"key": "k", "action": "made", "object": "thing", "data": '{"n": 12345678901234567.890}'}


def encode(writer: Any, query: str, **fields: Any) -> Encoded:
    written = writer.write(iter([pa.RecordBatch.from_pylist([{**ROW, **fields}])]))
    assert isinstance(written, Encoded)
    written.query = query
    return written


def test_a_repeated_commit_stages_nothing_and_what_is_no_repetition_is_refused(
    where: dict[str, str], connection: Connection
) -> None:
    """Guarantee 44."""

    def staged() -> Any:
        made = "SELECT data ->> 'n' FROM penstock.staged_records WHERE action = 'made'"
        return connection.execute(made).fetchall()

    writer = make_writer(where)
    message = encode(writer, "a")
    other, empty = encode(writer, "a", key="another"), Encoded("a", [], 0)
    for batch, content in [(4, message), (4, message), (5, message), (6, empty), (6, empty)]:
        make_writer(where).commit([content, None], batch)

    assert staged() == [("12345678901234567.890",)] * 2
    for batch, content in [(6, message), (6, other), (5, message), (5, other), (5, empty), (4, message)]:
        with pytest.raises(Fenced, match="startingOffsets where that micro-batch ends"):
            make_writer(where).commit([content], batch)
    with pytest.raises(Gap, match="micro-batch 8 follows 6"):
        writer.commit([other], 8)
    with pytest.raises(Fenced, match="give this one a name of its own"):
        writer.commit([encode(writer, "b")], 7)
    make_writer(where, name="another").commit([encode(writer, "b")], 7)
    assert len(staged()) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", None),
        ("action", ""),
        ("data", "secret"),
        ("data", '{"secret": NaN}'),
        ("data", '"\\u0000secret"'),
        ("headers", '["secret"]'),
    ],
)
def test_an_invalid_row_is_refused_by_the_name_of_its_field(where: dict[str, str], field: str, value: Any) -> None:
    with pytest.raises(InvalidRecord, match=field) as raised:
        encode(make_writer(where), "a", **{field: value})

    assert "secret" not in str(raised.value).replace('data["secret"]', "").replace("data.secret", "")


@pytest.mark.parametrize(
    ("options", "schema", "text"),
    [
        ({}, StructType().add("key", StringType()), "no column 'action'"),
        ({}, StructType([*COLUMNS.fields[:3]]).add("data", LongType()), "JSON text"),
        ({"topic": "x"}, COLUMNS, "no option 'topic'"),
        ({"channel": "nothing"}, COLUMNS, "no log 'nothing'"),
    ],
)
def test_what_cannot_be_staged_is_refused_before_a_task_runs(
    where: dict[str, str], options: dict[str, str], schema: StructType, text: str
) -> None:
    with pytest.raises((InvalidSetting, Unknown), match=text):
        make_writer(where, schema, **options)


@pytest.mark.parametrize("type_", [pa.date32(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")])
@pytest.mark.parametrize("year", [-43, 0, 10_000, 200_000])
def test_a_year_that_json_does_not_have_is_refused_by_the_name_of_its_field(type_: pa.DataType, year: int) -> None:
    days = (year - 1970) * 366
    value = pa.array([days if pa.types.is_date(type_) else days * 86_400_000_000]).cast(
        pa.int32() if pa.types.is_date(type_) else pa.int64()
    )
    data = pa.StructArray.from_arrays([pa.array([1]), value.cast(type_)], ["n", "at"])

    with pytest.raises(InvalidRecord, match=r"^data\.at: .* a year before 1 or after 9999$"):
        read_rows(pa.RecordBatch.from_arrays([pa.array(["k"]), data], ["key", "data"]))


def test_what_postgres_refuses_is_reported_without_payload(where: dict[str, str], connection: Connection) -> None:
    connection.execute("ALTER TABLE penstock.staged_records ADD CONSTRAINT none CHECK (action <> 'made')")
    given = {"channel": "things", "databaseUrl": where["databaseUrl"]}
    writer = BatchStager(given, COLUMNS, overwrite=False)

    with pytest.raises(StagingError, match="SQLSTATE 23514") as raised:
        writer.commit([encode(writer, "")])

    assert "123456" not in str(raised.value)


def test_rows_may_name_their_logs(
    where: dict[str, str], connection: Connection, database_url: str, redis_url: str
) -> None:
    with Streamer(Pipeline([Log("others", shards=1)]), database_url, redis_url) as another:
        another.drain()
    given = {"databaseUrl": where["databaseUrl"]}
    schema = StructType([*COLUMNS, *StructType().add("channel", StringType())])
    writer: Any = StreamStager({**given, "name": "both"}, schema, overwrite=False)

    writer.commit([encode(writer, "q", channel=name) for name in ("things", "others")], 0)

    staged = "SELECT channel, count(*) FROM penstock.staged_records WHERE action = 'made' GROUP BY 1 ORDER BY 1"
    assert connection.execute(staged.encode()).fetchall() == [("others", 1), ("things", 1)]
    with pytest.raises(InvalidRecord, match="not the name of a registered log"):
        encode(writer, "q", channel="elsewhere")
    with pytest.raises(InvalidSetting, match="option name is missing"):
        StreamStager(given, schema, overwrite=False)
    with pytest.raises(InvalidSetting, match="or give the rows a column channel"):
        BatchStager(given, COLUMNS, overwrite=False)
