"""What a reconciliation on Spark has of its own: its comparison and its rows, which are exact in every type.

What is done with them is the same on both engines: see ``tests/reconciling``.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody writes it

from fixtures.formats import VALUES, create_with_values, set_unusual
from fixtures.reconciling import declare
from fixtures.selects import SELECTS, compare, create_items
from penstock import Log, Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.errors import DeclarationError, ServerUnavailable, SnapshotLost
from penstock.reconciling.comparison import DifferenceKind, StateComparison
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import Comparer, Reconciled, reconcile
from penstock.reconciling.state_repair import CanonicalRows
from penstock.records import DEFAULT_SCOPE
from penstock.spark.reconcile.spark_comparer import SparkComparer, Tables

Run = Callable[..., Reconciled]


@pytest.fixture
def run(spark: SparkSession, flow: Pipeline, keeper: str, database_url: str) -> Run:
    """Reconciles by the canonical query or function, on Spark unless there is another comparer."""

    def go(
        canonical: Any = "TABLE public.canonical",
        comparer: Comparer | None = None,
        intent: Any = "compare",
        **declared: Any,
    ) -> Reconciled:
        spec = declare(flow, keeper, canonical, **declared)
        return reconcile(
            lambda: connect_postgres(database_url, application="test"),
            DEFAULT_SCOPE,
            spec,
            comparer or SparkComparer(spark, database_url),
            intent=intent,
        )

    return go


def count_apart(connection: Connection) -> int:
    """Number of rows whose text differs, which also tells 0 from -0; 1.50 and 1.5 are the same."""
    texts = ", ".join(f'trim_scale("{type_}")::text' if type_ == "numeric" else f'"{type_}"::text' for type_ in VALUES)
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


def test_every_value_is_compared_and_repaired_exactly(run: Run, connection: Connection) -> None:
    """Guarantees 22 and 28: in one wide table, of a database with unusual settings; each run takes a second and more.

    Nothing is found that is not there, and what is written is the canonical value.
    """
    rows = create_with_values(connection, "public.canonical")
    connection.execute("CREATE TABLE public.state (LIKE public.canonical INCLUDING ALL)")
    set_unusual(connection)

    run(intent="replace")
    written = connection.execute("SELECT count(*) FROM public.state").fetchone()
    apart = count_apart(connection)
    for type_, value, near in NEAR:
        update = f'UPDATE public.state SET "{type_}" = {near} WHERE id = {rows[type_, value]}'
        connection.execute(update.encode())
    absent = [number for (type_, _), number in rows.items() if type_ in {"bytea", "jsonb", "time"}]
    connection.execute("DELETE FROM public.state WHERE id = ANY (%s)", (absent,))
    repaired = run(intent="repair")

    assert (written, apart) == ((len(rows),), 0)
    assert repaired.comparison is not None
    assert repaired.comparison.counts == {DifferenceKind.DIFFERENT: len(NEAR), DifferenceKind.MISSING: len(absent)}
    assert repaired.repaired == len(NEAR) + len(absent)
    assert (run().clean, count_apart(connection)) == (True, 0)


@pytest.fixture
def in_berlin(spark: SparkSession) -> Iterator[None]:
    """A session in a zone where an hour comes twice in October."""
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    yield
    spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.usefixtures("in_berlin")
def test_rows_computed_by_spark_are_compared_and_repaired_exactly(run: Run, connection: Connection) -> None:
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

    def canonical(tables: Tables) -> DataFrame:
        frame = tables("public.source")
        return frame.withColumn("n", F.col("n") * 2).withColumn("ratio", F.col("ratio") + 1)

    filled = run(canonical, intent="repair")
    connection.execute("UPDATE public.state SET text = text || '0' WHERE id = 2")  # 0.50
    connection.execute("UPDATE public.state SET n = n + 1e-25, at = at WHERE id = 3")
    connection.execute("UPDATE public.state SET id = 4.5 WHERE id = 4")
    repaired = run(canonical, intent="repair")
    [(apart,)] = connection.execute(
        "SELECT count(*) FROM (SELECT id, n, whole, long, at, day, ratio FROM public.state EXCEPT "
        "SELECT id, n * 2, whole, long, at, day, ratio + 1 FROM public.source) d"
    )

    assert filled.repaired == 9
    assert repaired.comparison is not None
    assert repaired.comparison.counts == {
        DifferenceKind.DIFFERENT: 1,
        DifferenceKind.MISSING: 1,
        DifferenceKind.SURPLUS: 1,
    }
    assert (apart, run(canonical).clean) == (0, True)


def test_a_tolerance_applies_to_numbers_of_any_size(run: Run, connection: Connection) -> None:
    values = {1: "1.000", 2: "1e30", 3: "NaN", 4: "12345678901234567890.5", 5: "2"}
    off_by = {1: "1.009", 2: "1000000000000000000000000000000.001", 3: "NaN", 4: "12345678901234567890.509"}  # fmt: skip
    connection.execute("CREATE TABLE public.canonical (id int, n numeric, f float8)")
    connection.execute("CREATE TABLE public.state (id int, n numeric, f float8)")
    for number, value in values.items():
        insert = b"INSERT INTO public.%s VALUES (%%s, %%s::text::numeric, 'NaN')"
        connection.execute(insert % b"canonical", (number, value))
        connection.execute(insert % b"state", (number, off_by.get(number, "NaN")))

    found = run(tolerance={"n": 0.01, "f": 0.1}).comparison

    assert found is not None
    # Beyond 20 digits before the point a tolerance does not apply: such numbers must be equal.
    assert [difference.key for difference in found.differences] == ['{"id":2}', '{"id":5}']


TABLES = """
CREATE TABLE public.canonical AS
SELECT i AS id, i * 1.5 AS number, 'c' || i AS code, i AS cents, 'name ' || i AS name, 0.5 * i AS share
FROM generate_series(1, 120) i;
CREATE TABLE public.state AS TABLE public.canonical;
UPDATE public.state SET cents = cents + 1 WHERE id IN (2, 9, 10, 100);
UPDATE public.state SET name = NULL WHERE id IN (9, 10);
UPDATE public.state SET share = share + 0.0001 WHERE id IN (11, 12);
DELETE FROM public.state WHERE id = 20;
INSERT INTO public.state SELECT 1000, 1500, 'c1000', 0, 'name', 0;
INSERT INTO public.state SELECT * FROM public.state WHERE id = 30
"""


def test_differences_are_told_as_the_inline_engine_tells_them(
    spark: SparkSession, run: Run, connection: Connection, database_url: str, tmp_path: Path
) -> None:
    """Which columns, in the order of the key's type, whole rows only where asked for, and a report for each reconciliation."""
    for statement in TABLES.split(";"):
        connection.execute(statement.encode())
    report, inline_report = tmp_path / "spark.csv", tmp_path / "inline.csv"
    counts: list[Any] = []
    for key, with_rows in (("id", True), ("number", False), ("code", False)):
        on_spark, inline = (
            run(comparer=each, key=key, name=name, tolerance={"share": 0.01}).comparison
            for name, each in (
                (key, SparkComparer(spark, database_url, str(report), with_rows=with_rows)),
                (f"{key}i", InlineComparer(database_url, str(inline_report), with_rows=with_rows)),
            )
        )
        assert on_spark is not None
        assert inline is not None
        assert (on_spark.counts, on_spark.by_column) == (inline.counts, inline.by_column)
        assert _told(map(asdict, on_spark.differences)) == _told(map(asdict, inline.differences))
        assert _told(_read(report, key)) == _told(_read(inline_report, f"{key}i"))
        counts.append(on_spark.counts)

    assert counts == 3 * [
        {DifferenceKind.MISSING: 1, DifferenceKind.SURPLUS: 1, DifferenceKind.DOUBLED: 1, DifferenceKind.DIFFERENT: 4}
    ]
    assert sorted(path.name for path in report.iterdir()) == ["code.csv", "id.csv", "number.csv"]


def _told(differences: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each difference, with its key and its rows as values: Spark writes numbers in them as text."""

    def plain(value: object) -> object:
        try:
            return float(str(value))
        except ValueError:
            return value

    def as_text(field: object) -> object:
        is_json = isinstance(field, str) and field.startswith("{")
        return {k: plain(v) for k, v in json.loads(str(field)).items()} if is_json else field

    return [{name: as_text(field) for name, field in each.items()} for each in differences]


def _read(report: Path, name: str) -> list[dict[str, str]]:
    """The lines of a report: a file, or on Spark a directory with one."""
    place = report / f"{name}.csv"
    [file] = place.glob("*.csv") if place.is_dir() else [place]
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


NAMES = ["", "a", "A", "\u00e4", "a'b", 'a"b', "a\\b", "a\nb", "{}", "ss", "\U0001f680", " a", "NULL"]  # fmt: skip
KEY = ("i,d`\"'", "n.n%s\\", "day", "code")
"""Columns of a key, of which two have the hardest names."""


def test_keys_of_any_name_and_value_are_found_again(run: Run, connection: Connection) -> None:
    """Guarantee 28: a repair looks the rows of its keys up on both sides."""
    columns = [f'"{name.replace(chr(34), 2 * chr(34))}"' for name in KEY]
    select = "SELECT n AS {}, i / 4.0 AS {}, date '2026-01-01' + i AS {}, md5(n || i)::uuid AS {}, i AS cents"
    connection.execute(
        f"CREATE TABLE public.canonical AS {select.format(*columns)} FROM unnest(%(names)s::text[]) n, generate_series(1, 3) i".replace(
            "%s\\", "%%s\\"
        ).encode(),
        {"names": NAMES},
    )
    connection.execute("CREATE TABLE public.state (LIKE public.canonical)")

    def canonical(tables: Tables) -> DataFrame:
        return tables("public.canonical")

    filled = run(canonical, intent="repair", key=KEY)
    connection.execute("UPDATE public.state SET cents = cents + 10 WHERE cents = 2")
    connection.execute(f"UPDATE public.state SET {columns[0]} = {columns[0]} || 'x' WHERE cents = 3".encode())
    repaired = run(canonical, intent="repair", key=KEY)
    [(apart,)] = connection.execute("SELECT count(*) FROM (TABLE public.state EXCEPT TABLE public.canonical) d")

    assert filled.repaired == 3 * len(NAMES)
    assert repaired.comparison is not None
    assert set(repaired.comparison.counts.values()) == {len(NAMES)}
    assert (repaired.repaired, apart) == (3 * len(NAMES), 0)


def test_columns_that_differ_only_in_case_are_two(run: Run, connection: Connection) -> None:
    """Guarantee 28: Postgres tells them apart, Spark does not."""
    connection.execute(
        """CREATE TABLE public.canonical AS SELECT i AS "Id", -i AS id, i / 8.0 AS v, 'x' || i AS "V" FROM generate_series(1, 9) i"""
    )
    connection.execute("CREATE TABLE public.state (LIKE public.canonical)")

    filled = run(intent="replace", key=("Id", "id"))
    connection.execute("""UPDATE public.state SET v = 0, "V" = '' WHERE id = -3""")
    connection.execute("""UPDATE public.state SET id = 3 WHERE id = -4""")
    repaired = run(lambda tables: tables("public.canonical"), intent="repair", key=("Id", "id"))

    assert (filled.repaired, repaired.repaired) == (9, 3)
    assert repaired.comparison is not None
    assert repaired.comparison.by_column == {"v": 1, "V": 1}
    assert run(key=("Id", "id")).clean


@pytest.mark.parametrize("name", ["bound", "union_all", "text clause", "semicolon and comment"])
def test_a_canonical_query_is_what_postgres_runs(
    spark: SparkSession, flow: Pipeline, things: Log, connection: Connection, database_url: str, name: str
) -> None:
    create_items(connection)

    equal, rows = compare(SparkComparer(spark, database_url), flow, things, connection, SELECTS[name])

    assert equal
    assert sorted(rows) == list(range(1, len(SELECTS[name].values) + 1))


def test_what_cannot_be_compared_is_refused_with_the_reason(run: Run, connection: Connection) -> None:
    connection.execute("CREATE TABLE public.state (id int, cents numeric(12, 2), note text)")
    refused: tuple[tuple[Any, str, dict[str, Any]], ...] = (
        ("SELECT 1 AS cents", "no column 'id'", {}),
        (lambda tables: tables.query("SELECT 1 AS id").selectExpr("id", "1 AS a", "2 AS a"), "are named 'a'", {}),
        ("SELECT NULL::int AS id, 1 AS cents", "has a NULL; a key must", {}),
        ("SELECT 1 AS id, 1 AS cents UNION ALL SELECT 1, 2", "more than once in the canonical", {}),
        ("SELECT 1 AS id, true AS cents", "'cents' is boolean in the canonical rows", {}),
        ("SELECT 1 AS id, 'a' AS note", "tolerance is for numbers", {"tolerance": {"note": 1}}),
    )
    for query, words, declared in refused:
        with pytest.raises(DeclarationError, match=words):
            run(query, **declared)


class CutOff(SparkComparer):
    """Closes all other connections before anything is read, as a restart of Postgres would."""

    def __init__(self, spark: SparkSession, database_url: str, connection: Connection) -> None:
        super().__init__(spark, database_url)
        self._connection = connection

    def compare(self, *arguments: Any, **options: Any) -> StateComparison:
        self._cut()
        return super().compare(*arguments, **options)

    def rows(self, *arguments: Any, **options: Any) -> CanonicalRows:
        """They are read on demand."""
        rows = super().rows(*arguments, **options)
        self._cut()
        return rows

    def _cut(self) -> None:
        self._connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.mark.parametrize("intent", ["compare", "bootstrap"])
def test_a_lost_snapshot_is_reported(
    spark: SparkSession, run: Run, connection: Connection, database_url: str, intent: str
) -> None:
    connection.execute("CREATE TABLE public.canonical AS SELECT 1 AS id, 1 AS n")
    connection.execute("CREATE TABLE public.state (LIKE public.canonical)")

    with pytest.raises((SnapshotLost, ServerUnavailable)):
        run(comparer=CutOff(spark, database_url, connection), intent=intent)
    outcome = connection.execute("SELECT outcome FROM penstock.reconciliations").fetchone()

    assert outcome in {("SnapshotLost",), ("ServerUnavailable",)}
