"""A reconciliation compares every value exactly, and repairs it to exactly this value."""

import random
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it
from sqlalchemy.orm import Session

from fixtures.formats import VALUES, create_with_values, set_unusual
from penstock import Log, Pipeline
from penstock.consuming import LogWorker
from penstock.database.connections import Connection, connect_postgres
from penstock.errors import DeclarationError, Refused
from penstock.reconciling import DifferenceKind, Reconciled, reconcile
from penstock.records import DEFAULT_SCOPE, Record
from penstock.spark.reconcile import SparkComparer, Tables

pytestmark = pytest.mark.spark
Run = Callable[..., Reconciled]


@pytest.fixture
def keeper(flow: Pipeline, things: Log, database_url: str, redis_url: str) -> Pipeline:
    """A consumer that has started; its state is empty."""

    @flow.consumer(reads=things)
    def keeper(_session: Session, _records: Sequence[Record]) -> None: ...

    worker = LogWorker(flow, flow.get_consumer("keeper"), database_url, redis_url)
    worker.drain()
    worker.close()
    return flow


@pytest.fixture
def run(spark: SparkSession, keeper: Pipeline, database_url: str) -> Run:
    def go(name: str = "keeper", **options: Any) -> Reconciled:
        return reconcile(
            lambda: connect_postgres(database_url, application="test"),
            DEFAULT_SCOPE,
            keeper.get_reconciliation(name),
            SparkComparer(spark, database_url),
            **options,
        )

    return go


Rows = dict[tuple[str, str], int]


@pytest.fixture
def rows(connection: Connection) -> Rows:
    """Canonical rows with every hard value and random numbers, in a database with unusual settings."""
    rows = create_with_values(connection, "public.canonical")
    connection.execute("CREATE TABLE public.state (LIKE public.canonical INCLUDING ALL)")
    dice = random.Random(30)
    for number in range(300):
        value = f"{dice.randint(-(10**40), 10**40)}e-{dice.randint(0, 40)}"
        insert = b"INSERT INTO public.canonical (id, numeric) VALUES (%s, %s::text::numeric)"
        connection.execute(insert, (1000 + number, value))
    set_unusual(connection)
    return rows


def count_apart(connection: Connection) -> int:
    """Number of rows whose text differs, which also tells 0 from -0; 1.50 and 1.5 are the same."""
    texts = ", ".join(
        f'trim_scale("{type_}")::text' if type_ == "numeric" else f'"{type_}"::text'
        for type_ in VALUES
    )
    connection.execute("SET extra_float_digits = 1")
    [(number,)] = connection.execute(
        f"SELECT count(*) FROM (SELECT id, {texts} FROM public.state EXCEPT SELECT id, {texts} FROM public.canonical) d".encode()
    )
    return int(number)


NEAR = [
    ("numeric", "1e30", "1e30 + 1e-30"),
    ("numeric", "NaN", "0"),
    ("numeric", "Infinity", "0"),
    ("numeric", "-Infinity", "'NaN'"),
    ("timestamptz", "294276-12-31 23:59:59.999999+00", "'294276-12-31 23:59:59.999998+00'"),
    ("date", "5874897-12-31", "'infinity'"),
    ("double precision", "1.7976931348623157e308", "1.7976931348623155e308"),
    ("double precision", "0.30000000000000004", "0.3"),
    ("real", "0.1", "0.10000001"),
    ("timestamptz", "2026-01-02 03:04:05.000006+05", "'infinity'"),
    ("numeric(12, 2)", "NaN", "0"),
    ("float8[]", "{0.30000000000000004,NaN}", "'{0.3,NaN}'"),
    ("date", "0001-01-01", "'0001-01-01 BC'"),
    ("text[]", '{"a,b","NULL",NULL}', "ARRAY['a,b', NULL, 'NULL']"),
    ("money", "12.34", "NULL"),
]
"""Type and value, and another value near to it, as SQL."""


@pytest.mark.parametrize("intent", ["repair", "replace"])
def test_every_value_is_compared_and_repaired_exactly(
    run: Run, keeper: Pipeline, rows: Rows, connection: Connection, intent: str
) -> None:
    """Guarantees 22 and 28: nothing is found that is not there, and what is written is the canonical value."""

    @keeper.reconciliation(of="keeper", state="public.state", key="id")
    def canonical(_tables: Tables) -> str:
        return "SELECT * FROM public.canonical"

    filled = run(intent=intent)
    apart = count_apart(connection)
    for type_, value, near in NEAR:
        update = f'UPDATE public.state SET "{type_}" = {near} WHERE id = {rows[type_, value]}'
        connection.execute(update.encode())
    found = run().comparison
    run(intent=intent)

    assert (filled.repaired, apart) == (len(rows) + 300, 0)
    assert found is not None
    assert found.counts == {DifferenceKind.DIFFERENT: len(NEAR)}
    assert (run().clean, count_apart(connection)) == (True, 0)


@pytest.fixture
def in_berlin(spark: SparkSession) -> Iterator[None]:
    """A session in a zone where an hour comes twice in October."""
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    yield
    spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.usefixtures("in_berlin")
def test_rows_computed_by_spark_are_compared_and_repaired_exactly(
    run: Run, keeper: Pipeline, connection: Connection
) -> None:
    """Guarantee 28: in Spark's own types, and where the types of the two sides differ."""
    connection.execute(
        "CREATE TABLE public.source AS SELECT i AS id, i / 8.0 AS n, i AS whole, i::numeric AS long, "
        "timestamptz '2026-10-25 00:30+00' + i * interval '0.5 hours' AS at, date '2026-01-01' + i AS day, "
        "(i / 4.0)::numeric(9, 2) AS text, i / 3.0::float8 AS ratio FROM generate_series(1, 9) i"
    )
    connection.execute(
        "CREATE TABLE public.state (id numeric(9, 2), n numeric, whole numeric(9, 2), long int, at timestamptz, "
        "day timestamp, text text, ratio float8)"
    )

    @keeper.reconciliation(of="keeper", state="public.state", key="id")
    def canonical(tables: Tables) -> DataFrame:
        frame = tables("public.source")
        return frame.withColumn("n", F.col("n") * 2).withColumn("ratio", F.col("ratio") + 1)

    filled = run(intent="repair")
    connection.execute("UPDATE public.state SET text = text || '0' WHERE id = 2")  # 0.50
    clean = run()
    connection.execute("UPDATE public.state SET n = n + 1e-25, at = at WHERE id = 3")
    connection.execute("UPDATE public.state SET id = 4.5 WHERE id = 4")
    found = run().comparison
    run(intent="repair")
    [(apart,)] = connection.execute(
        "SELECT count(*) FROM (SELECT id, n, whole, long, at, day, ratio FROM public.state EXCEPT "
        "SELECT id, n * 2, whole, long, at, day, ratio + 1 FROM public.source) d"
    )

    assert (filled.repaired, clean.comparison.equal) == (9, True)  # type: ignore[union-attr]
    assert found is not None
    assert found.counts == {
        DifferenceKind.DIFFERENT: 1,
        DifferenceKind.MISSING: 1,
        DifferenceKind.SURPLUS: 1,
    }
    assert (apart, run().clean) == (0, True)


def test_a_tolerance_applies_to_numbers_of_any_size(
    run: Run, keeper: Pipeline, connection: Connection
) -> None:
    values = {1: "1.000", 2: "1e30", 3: "NaN", 4: "12345678901234567890.5", 5: "2"}
    off_by = {1: "1.009", 2: "1000000000000000000000000000000.001", 3: "NaN", 4: "12345678901234567890.509"}  # fmt: skip
    connection.execute("CREATE TABLE public.canonical (id int, n numeric, f float8)")
    connection.execute("CREATE TABLE public.state (id int, n numeric, f float8)")
    for number, value in values.items():
        insert = b"INSERT INTO public.%s VALUES (%%s, %%s::text::numeric, 'NaN')"
        connection.execute(insert % b"canonical", (number, value))
        connection.execute(insert % b"state", (number, off_by.get(number, "NaN")))

    @keeper.reconciliation(
        of="keeper", state="public.state", key="id", tolerance={"n": 0.01, "f": 0.1}
    )
    def canonical(_tables: Tables) -> str:
        return "SELECT * FROM public.canonical"

    found = run().comparison
    assert found is not None
    # Beyond 20 digits before the point a tolerance does not apply: such numbers must be equal.
    assert [difference.key for difference in found.differences] == ['{"id":2}', '{"id":5}']


def test_a_value_that_the_state_cannot_hold_is_refused_with_its_column(
    run: Run, keeper: Pipeline, connection: Connection
) -> None:
    """Guarantee 28: a repair that rounds or truncates would be found again, and repaired again, every night."""
    connection.execute("CREATE TABLE public.state (id int, cents numeric(12, 2), code varchar(3))")

    def declare(name: str, query: str) -> None:
        keeper.reconciliation(of="keeper", state="public.state", key="id", name=name)(
            lambda _: query
        )

    declare("rounds", "SELECT 1 AS id, 1.239 AS cents")
    declare("truncates", "SELECT 1 AS id, 'abcd' AS code")
    declare("mixes", "SELECT 1 AS id, true AS cents")

    for intent in ("repair", "replace"):
        with pytest.raises(Refused, match=r"column 'cents' of public.state, numeric\(12,2\)"):
            run("rounds", intent=intent)
        with pytest.raises(Refused, match=r"column 'code' of public.state, character varying\(3\)"):
            run("truncates", intent=intent)
    with pytest.raises(DeclarationError, match="'cents' is boolean in the canonical rows"):
        run("mixes")
    assert connection.execute("SELECT count(*) FROM public.state").fetchone() == (0,)


def test_a_key_may_have_any_name(run: Run, keeper: Pipeline, connection: Connection) -> None:
    name, other = "i,d`\"'", "n.n%s\\"
    columns = f'"{name.replace(chr(34), chr(34) * 2)}" numeric, "{other}" numeric'
    connection.execute(f"CREATE TABLE public.state ({columns})".encode())
    connection.execute(f"CREATE TABLE public.canonical ({columns})".encode())
    connection.execute("INSERT INTO public.canonical VALUES (1.50, 1e30), (2, NULL)")

    @keeper.reconciliation(of="keeper", state="public.state", key=(name,))
    def canonical(tables: Tables) -> DataFrame:
        return tables("public.canonical")

    assert run(intent="repair").repaired == 2
    assert run().clean
    assert connection.execute("TABLE public.state").fetchall() == [
        (Decimal("1.50"), Decimal("1e30")),
        (2, None),
    ]
