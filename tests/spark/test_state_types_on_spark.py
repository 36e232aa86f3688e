"""What a state's column holds of a canonical value, on Spark: of queries, whose values Postgres casts, and of DataFrames."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from sqlalchemy.orm import Session

from fixtures.assignments import BETWEEN_FLOATS, create_assignments
from fixtures.flow import OpenWorker
from penstock import Log, Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.errors import Refused
from penstock.reconciling.reconciliation import Reconciled, reconcile
from penstock.records import DEFAULT_SCOPE, Record
from penstock.spark.reconcile.spark_comparer import SparkComparer, Tables

Run = Callable[..., Reconciled]


@pytest.fixture
def run(spark: SparkSession, flow: Pipeline, things: Log, database_url: str, open_worker: OpenWorker) -> Run:
    """Reconciles ``public.state`` on Spark."""

    @flow.consumer(reads=things)
    def keeper(_session: Session, _records: Sequence[Record]) -> None: ...

    with open_worker("keeper") as worker:
        worker.drain()

    def go(canonical: Any, intent: Any = "compare") -> Reconciled:
        name = f"r{len(flow.reconciliations)}"
        function = canonical if callable(canonical) else lambda _: canonical
        flow.reconciliation(of=keeper, state="public.state", key="id", name=name)(function)
        return reconcile(
            lambda: connect_postgres(database_url, application="test"),
            DEFAULT_SCOPE,
            flow.get_reconciliation(name),
            SparkComparer(spark, database_url),
            intent=intent,
        )

    return go


def test_what_a_column_holds_of_another_type_is_equal_on_spark(run: Run, connection: Connection) -> None:
    """Guarantee 43: a part of the pairs of types that Postgres casts on assignment; the inline engine has all."""
    pairs = create_assignments(connection, every=7)

    found = run("TABLE public.canon").comparison
    assert found is not None
    differing = [pairs[name] for name in found.by_column]
    assert [each for each in differing if each[0] not in BETWEEN_FLOATS] == []

    connection.execute("DELETE FROM public.state")
    run("TABLE public.canon", "repair")
    again = run("TABLE public.canon").comparison
    assert again is not None
    assert ([pairs[name] for name in again.by_column], again.equal) == ([], True)


COLUMNS: dict[str, tuple[str, Callable[[], Any], str]] = {
    # a state's column, Spark's, and a value of the former that is another one
    "ints": ("int[]", lambda: F.array("id", F.lit(None), F.col("id") * 2), "'{7}'"),
    "nested": ("int[]", lambda: F.array(F.array("id", F.lit(2))), "'{{1,3}}'"),
    "texts": ("text[]", lambda: F.array(F.lit('a"b\\'), F.lit("NULL"), F.lit(""), F.lit("a,b{}"), F.lit(None)), "'{}'"),
    "decimals": ("numeric(10,2)[]", lambda: F.array(F.lit("1.005").cast("decimal(9,3)"), F.lit(None)), "'{1.00}'"),
    "times": ("timestamptz[]", lambda: F.array(F.timestamp_seconds(F.col("id") + 0.5)), "'{infinity}'"),
    "pair": ("public.pair", lambda: F.struct(F.col("n"), F.lit('a "b", (c)').alias("other")), "'(1.5,b)'"),
    "pairs": ("public.pair[]", lambda: F.array(F.struct(F.col("n"), F.lit(None).cast("string").alias("t"))), "'{}'"),
    "took": ("interval", lambda: F.timestamp_seconds(F.col("id") * 100_000.25) - F.timestamp_seconds(F.lit(0)), "'1 day'"),
    "before": ("interval", lambda: F.timestamp_seconds(F.lit(0)) - F.timestamp_seconds(F.col("id") * 100_000), "'1 day'"),
    "months": ("interval", lambda: F.expr("make_ym_interval(1, CAST(id AS int))"), "'1 month'"),
    "document": ("jsonb", lambda: F.to_json(F.struct("id", F.lit("x").alias("a"))), "'{}'"),
    "raw": ("json", lambda: F.to_json(F.struct("id", F.lit("x").alias("a"))), "'{}'"),
    "map": ("jsonb", lambda: F.create_map(F.lit("k"), F.col("n")), "'{}'"),
    "record": ("jsonb", lambda: F.struct("n", F.array("id").alias("list")), "'{}'"),
    "list": ("jsonb", lambda: F.array("n", F.lit(None)), "'[]'"),
    "map_text": ("text", lambda: F.create_map(F.lit("k"), F.col("id")), "'{}'"),
    "uuid": ("uuid", lambda: F.lit("6ECD8C99-4036-403D-BF84-CF8400F67836"), "NULL"),
    "mood": ("public.mood", lambda: F.lit("sad"), "'glad'"),
    "rounded": ("numeric(6,1)", lambda: F.col("n") / 8, "0"),
    "domain": ("public.cents", lambda: F.col("n") / 8, "0"),
    "whole": ("int", lambda: F.lit("1.50").cast("decimal(5,2)"), "1"),
    "ratio": ("real", lambda: F.lit(0.123456789), "0.2"),
    "wide": ("float8", lambda: F.lit(0.1).cast("float"), "0.2"),
    "exact": ("numeric", lambda: F.lit(0.1), "0.2"),
    "day": ("date", lambda: F.timestamp_seconds(F.col("id") * 100_000), "'infinity'"),
    "second": ("timestamptz(0)", lambda: F.timestamp_seconds(F.lit(1.75)), "'infinity'"),
    "padded": ("char(5)", lambda: F.lit("ab"), "'abc'"),
    "cut": ("varchar(5)", lambda: F.lit("ab"), "'abc'"),
    "bytes": ("bytea", lambda: F.lit(bytearray(b"\x00\xff")), "NULL"),
    "bits": ("bit(3)", lambda: F.lit("101"), "'111'"),
    "range": ("numrange", lambda: F.lit("[1.0,2)"), "'empty'"),
    "address": ("inet", lambda: F.lit("10.0.0.1/32"), "'10.0.0.2'"),
    "amounts": ("public.amounts", lambda: F.array(F.lit(1.25)), "'{}'"),
}  # fmt: skip


def canonical(tables: Tables) -> DataFrame:
    return tables("public.source").select("id", *(column().alias(name) for name, (_, column, _) in COLUMNS.items()))


def test_a_dataframe_of_any_type_is_compared_and_repaired(run: Run, connection: Connection) -> None:
    """Guarantee 43: arrays, structs, maps, intervals, documents: nothing is found again that was repaired."""
    create_assignments(connection, every=0)
    connection.execute("DROP TABLE public.state, public.canon")
    connection.execute(
        "CREATE TABLE public.source AS SELECT i AS id, i::numeric(9, 2) AS n FROM generate_series(1, 4) i"
    )
    typed = ", ".join(f'"{name}" {type_}' for name, (type_, _, _) in COLUMNS.items())
    connection.execute(f"CREATE TABLE public.state (id int PRIMARY KEY, {typed})".encode())

    run(canonical, "replace")
    filled = run(canonical).comparison
    for number, (name, (_, _, other)) in enumerate(COLUMNS.items()):
        connection.execute(f'UPDATE public.state SET "{name}" = {other} WHERE id = {1 + number % 4}'.encode())
    repaired = run(canonical, "repair").comparison
    again = run(canonical).comparison

    assert filled is not None
    assert repaired is not None
    assert again is not None
    assert dict(filled.by_column) == {}
    assert dict(repaired.by_column) == dict.fromkeys(COLUMNS, 1)
    assert (dict(again.by_column), again.equal) == ({}, True)
    written = connection.execute(
        "SELECT took::text, before::text, nested::text, pair::text, whole, texts FROM public.state WHERE id = 3"
    ).fetchone()
    assert written == (
        *("P3DT11H20M0.75S", "P-3DT-11H-20M", "{{3,2}}", '(3.0,"a ""b"", (c)")', 2),
        ['a"b\\', "NULL", "", "a,b{}", None],
    )


@pytest.mark.parametrize("intent", ["compare", "repair", "replace"])
def test_a_value_that_no_column_can_hold_is_refused_by_name_on_spark(
    run: Run, connection: Connection, intent: Any
) -> None:
    """Guarantee 43: of a query and of a DataFrame alike, without the value."""
    connection.execute("CREATE TABLE public.source AS SELECT 1 AS id, 'secret' AS v")
    connection.execute("CREATE TABLE public.state (id int PRIMARY KEY, v int)")

    for given in ("SELECT id, v FROM public.source", lambda tables: tables("public.source")):
        with pytest.raises(Refused, match=r"column 'v' of public\.state, integer, cannot hold") as refusal:
            run(given, intent)
        assert "secret" not in str(refusal.value)
