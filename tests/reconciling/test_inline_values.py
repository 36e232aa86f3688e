"""The inline comparison and its repair are exact for every type of Postgres."""

import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from sqlalchemy.orm import Session

from fixtures.constants import SetConstants
from fixtures.formats import create_with_values, set_unusual
from fixtures.reconciling import Run
from penstock import Log, Pipeline
from penstock.database.connections import Connection, connect_postgres
from penstock.errors import DeclarationError, InvalidSetting, Refused, SnapshotLost, Unknown
from penstock.reconciling.comparison import CanonicalTables, DifferenceKind, needs_spark
from penstock.reconciling.cut import export_snapshot
from penstock.reconciling.inline_comparer import InlineComparer
from penstock.reconciling.reconciliation import Intent
from penstock.records import Record

EQUAL = [
    ("1::int", "1.00::numeric"),
    ("1.50::numeric", "1.5::numeric"),
    ("1::bigint", "1::smallint"),
    ("0.5::numeric", "0.5::float8"),
    ("'a'::varchar", "'a'::text"),
    ("'a'::char(3)", "'a'::text"),
    ("date '2026-01-01'", "timestamp '2026-01-01'"),
    ("""'{"a": 1}'::jsonb""", """'{"a":1}'::json"""),
    ("0::float8", "'-0'::float8"),
    ("0.1::numeric", "0.1::real"),
    ("point '(1,2)'", "point '(1,2)'"),
]

DIFFERENT = [
    ("1e30::numeric", "(1e30 + 1)::numeric"),
    ("'infinity'::date", "'2026-01-01'::date"),
    ("9223372036854775807", "9223372036854775806"),
    ("'a'::text", "'a '::text"),
    ("NULL::int", "0"),
    # equal to Postgres
    ("box '(1,1),(0,0)'", "box '(3,1),(2,0)'"),
    ("interval '1 month'", "interval '30 days'"),
    ("""'{"a": 1}'::jsonb""", """'{"a": 1.0}'::jsonb"""),
]


@pytest.mark.parametrize("unusual", [False, True], ids=["default", "unusual"])
@pytest.mark.parametrize("intent", ["repair", "replace"])
def test_every_type_is_compared_and_repaired_exactly(
    run: Run, connection: Connection, intent: Intent, *, unusual: bool
) -> None:
    """Guarantee 28: whatever a database sets for its connections."""
    if unusual:
        set_unusual(connection)
    rows = create_with_values(connection, "public.canonical")
    connection.execute("CREATE TABLE public.state AS TABLE public.canonical WITH NO DATA")

    assert run("TABLE public.canonical", intent).repaired == len(rows)
    apart = connection.execute(
        "SELECT s::text, c::text FROM public.state s FULL JOIN public.canonical c USING (id) "
        "WHERE s::text IS DISTINCT FROM c::text"
    ).fetchall()
    assert apart == []
    assert run("TABLE public.canonical").clean

    for (type_, _), number in rows.items():
        connection.execute(f'UPDATE public.state SET "{type_}" = NULL WHERE id = {number}'.encode())
    found = run("TABLE public.canonical").comparison
    assert found is not None
    assert found.counts == {DifferenceKind.DIFFERENT: len(rows)}


def test_equal_values_of_two_types_are_equal(run: Run, connection: Connection) -> None:
    ours, theirs = (", ".join(f"{pair[side]} AS v{number}" for number, pair in enumerate(EQUAL)) for side in (0, 1))
    connection.execute(f"CREATE TABLE public.state AS SELECT 1 AS id, {theirs}".encode())

    assert run(f"SELECT 1 AS id, {ours}").clean


def test_values_that_differ_in_the_last_digit_differ(run: Run, connection: Connection) -> None:
    for number, (ours, theirs) in enumerate(DIFFERENT):
        table = f"public.state_{number}"
        connection.execute(f"CREATE TABLE {table} AS SELECT 1 AS id, {theirs} AS v".encode())

        assert not run(f"SELECT 1 AS id, {ours} AS v", state=table).clean, ours


def test_comparing_and_repair_read_text_under_the_same_settings(run: Run, connection: Connection) -> None:
    """Guarantee 28: with array_nulls off, the NULL of a key would be sought as a word, and its row would stay wrong."""
    connection.execute(f"ALTER DATABASE {connection.info.dbname} SET array_nulls = off".encode())
    connection.execute("CREATE TABLE public.state (id text[], v int)")
    connection.execute("INSERT INTO public.state VALUES (ARRAY['a', NULL], 1)")
    query = "SELECT ARRAY['a', NULL] AS id, 2 AS v"

    assert run(query, "repair").repaired == 1
    assert connection.execute("SELECT v FROM public.state").fetchall() == [(2,)]
    assert run(query).clean


def test_a_canonical_query_computes_in_utc(run: Run, connection: Connection) -> None:
    connection.execute(f"ALTER DATABASE {connection.info.dbname} SET TimeZone = 'Asia/Tokyo'".encode())
    connection.execute("CREATE TABLE public.state AS SELECT 1 AS id, date '2026-01-01' AS day")

    assert run("SELECT 1 AS id, timestamptz '2026-01-01 23:00Z'::date AS day").clean


def test_a_repair_reads_the_keys_of_its_batch_alone(
    run: Run, connection: Connection, set_constants: SetConstants
) -> None:
    connection.execute("CREATE TABLE public.state (a int[], b text, v int)")
    connection.execute("INSERT INTO public.state SELECT ARRAY[i], i::text, 0 FROM generate_series(1, 30) i")
    query = "SELECT ARRAY[i] AS a, i::text AS b, i AS v FROM generate_series(1, 20) i"
    set_constants("reconciling.reconciliation", REPAIR_BATCH=7)

    assert run(query, "repair", key=("a", "b")).repaired == 30
    assert run(query, key=("a", "b")).clean
    assert run("SELECT a, count(*) AS v FROM public.state GROUP BY a", "repair", key="a").repaired


def test_memory_holds_a_part_of_the_rows(run: Run, connection: Connection) -> None:
    connection.execute(
        "CREATE TABLE public.state AS SELECT i AS id, repeat('x', 100000) AS v FROM generate_series(1, 800) i"
    )
    tracemalloc.start()
    try:
        assert run("TABLE public.state").clean
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 60_000_000, "less than either side, which is 80 MB"


def test_what_cannot_be_compared_is_named(run: Run, connection: Connection) -> None:
    connection.execute("CREATE TABLE public.state (id int, v int)")

    with pytest.raises(Unknown, match=r'relation "public\.nothing" does not exist'):
        run("SELECT 1 AS id, 1 AS v", state="public.nothing")
    with pytest.raises(Unknown, match="column"):
        run("SELECT 1 AS id, 1 AS other")
    with pytest.raises(DeclarationError, match="two columns of the canonical rows are named 'v'"):
        run("SELECT 1 AS id, 1 AS v, 2 AS v")
    for query in ("SELECT 1 AS id, 'a AS v", "SELECT 1 AS id, 1 AS v FROM", "SELECT * FROM public.state FOR UPDATE"):
        with pytest.raises(DeclarationError, match="the canonical query must be one that reads"):
            run(query)
    with pytest.raises(DeclarationError, match="must return a query"):
        run(7)
    with pytest.raises(InvalidSetting, match="without Spark a report is CSV"):
        InlineComparer("", "report.parquet")
    with pytest.raises(InvalidSetting, match="no option 'snapshot'"):
        CanonicalTables()("public.state", snapshot="1")


def test_a_function_that_computes_with_dataframes_needs_spark(flow: Pipeline, things: Log) -> None:
    @flow.consumer(reads=things)
    def keeper(_session: Session, _records: Sequence[Record]) -> None: ...

    functions: dict[str, Callable[[CanonicalTables], object]] = {
        "frame": lambda tables: tables("t").groupBy("id").count(),
        "column": lambda tables: tables("t")["id"],
        "session": lambda tables: tables.spark.range(3),
        "table": lambda tables: tables("t", columns="a, b", where="a > 1", partitions="4"),
        "query": lambda tables: tables.query("SELECT 1 AS id"),
    }
    for name, function in functions.items():
        flow.reconciliation(of=keeper, state="public.t", key="id", name=name)(function)

    assert [n for n in functions if needs_spark(flow.get_reconciliation(n))] == ["frame", "column", "session"]


def test_json_has_numbers_and_truth_as_such_and_the_rest_as_text(
    run: Run, flow: Pipeline, connection: Connection, database_url: str
) -> None:
    query = """SELECT 1 AS id, 1.50 AS n, 'NaN'::float8 AS f, '-0'::float4 AS m, true AS b, 'a"' AS t, NULL::int AS z"""
    connection.execute(f"CREATE TABLE public.state AS {query}".encode())
    assert run(query).clean
    with connect_postgres(database_url, application="test") as holder, holder.transaction():
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        [spec] = flow.reconciliations.values()
        [row] = InlineComparer(database_url).rows(spec, export_snapshot(holder)).rows

    assert row == '{"id":1,"n":1.50,"f":"NaN","m":"-0","b":true,"t":"a\\"","z":null}'


def test_a_value_that_the_state_cannot_hold_is_refused_with_its_column(run: Run, connection: Connection) -> None:
    """Guarantee 28: a repair that truncates would be found again, and repaired again, every night."""
    connection.execute("CREATE TABLE public.state (id int, cents numeric(12, 2), code varchar(3))")

    for intent in ("repair", "replace"):
        with pytest.raises(Refused, match=r"column 'cents' of public.state, numeric\(12,2\)"):
            run("SELECT 1 AS id, 1e11 AS cents", intent)
        with pytest.raises(Refused, match=r"column 'code' of public.state, character varying\(3\)"):
            run("SELECT 1 AS id, 'abcd' AS code", intent)
    assert connection.execute("SELECT count(*) FROM public.state").fetchone() == (0,)


def test_both_sides_are_read_in_their_snapshots(
    run: Run, flow: Pipeline, connection: Connection, database_url: str
) -> None:
    """Guarantee 28: what is committed after the cut is not seen."""
    connection.execute("CREATE TABLE public.canonical AS SELECT 1 AS id, 1 AS v")
    connection.execute("CREATE TABLE public.state AS TABLE public.canonical")
    assert run("TABLE public.canonical").clean
    [spec] = flow.reconciliations.values()
    comparer = InlineComparer(database_url)
    with connect_postgres(database_url, application="test") as holder, holder.transaction():
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot = export_snapshot(holder)
        connection.execute("UPDATE public.canonical SET v = 2")
        connection.execute("DELETE FROM public.state")

        assert comparer.compare(spec, snapshot, snapshot).equal
        assert list(comparer.rows(spec, snapshot).rows) == ['{"id":1,"v":1}']
    with pytest.raises(SnapshotLost, match="Begin again with another cut"):
        comparer.compare(spec, snapshot, snapshot)


def test_keys_are_ordered_alike_whatever_their_collation(run: Run, connection: Connection) -> None:
    """Guarantee 28: two sides in two orders would differ in every key."""
    if not connection.execute("SELECT FROM pg_collation WHERE collname = 'und-x-icu'").fetchall():
        pytest.skip("this Postgres has no linguistic collation; Debian's has: --servers system")
    names = ["a", "B", "b", "A", " a", "a b", "ab", "\u00e4", "z", "Z", "_", "1", "\U0001f680"]
    connection.execute('CREATE TABLE public.state (id text COLLATE "und-x-icu", v int)')
    connection.execute("INSERT INTO public.state SELECT n, 1 FROM unnest(%s::text[]) n", (names,))

    assert run('SELECT id COLLATE "C" AS id, v FROM public.state').clean
