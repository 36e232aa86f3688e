"""Every value of every type arrives from ``penstock.table`` exactly, or is refused with the name of its column.

The reader runs here without Spark: Spark adds nothing to the values but its check of the types.
"""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from math import isnan
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from psycopg import sql
from pyspark.sql.types import DecimalType, StructType

from fixtures.formats import set_unusual
from penstock.database.connections import Connection
from penstock.embedded import EmbeddedPostgres
from penstock.errors import InvalidSetting, PenstockError, SnapshotLost, UnreadableValue
from penstock.spark import snapshot
from penstock.spark.sources.column_types import Field, PostgresColumn, fitting_decimal
from penstock.spark.sources.table_reader import TableDataSource


def read(database_url: str, schema: Any = None, **options: str) -> pa.Table:
    """What Spark reads, in the order in which it calls the source."""
    source = TableDataSource({"databaseUrl": database_url, **options})
    reader: Any = source.reader(source.schema() if schema is None else schema)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches) if batches else pa.table({})


def read_value(database_url: str, expression: str, **options: str) -> tuple[str, Any]:
    """The type in Spark and the value of an SQL expression."""
    query = f"SELECT {expression} AS x"
    source = TableDataSource({"databaseUrl": database_url, "query": query, **options})
    [value] = read(database_url, query=query, **options).column("x").to_pylist()
    return source.schema()["x"].dataType.simpleString(), value


pytestmark = pytest.mark.slow  # a hundred tasks, each with its own connections

UTC_NOON = datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=UTC)
DAY = 86_400_000_000
FIRST, LAST = (edge.replace(tzinfo=UTC) for edge in (datetime.min, datetime.max))  # noqa: DTZ901  the zone follows
MICROSECOND = timedelta(microseconds=1)
EXACT: list[tuple[str, str, Any]] = [
    ("true", "boolean", True),
    ("NULL::boolean", "boolean", None),
    ("'-32768'::smallint", "smallint", -32768),
    ("'-2147483648'::int", "int", -(2**31)),
    ("'9223372036854775807'::bigint", "bigint", 2**63 - 1),
    ("'-9223372036854775808'::bigint", "bigint", -(2**63)),
    ("0.1::float4", "float", 0.10000000149011612),
    ("0.1::float8 + 0.2", "double", 0.1 + 0.2),
    ("'5e-324'::float8", "double", 5e-324),
    ("'Infinity'::float8", "double", float("inf")),
    ("'-Infinity'::float4", "float", float("-inf")),
    ("''::bytea", "binary", b""),
    ("decode('00ff5c', 'hex')", "binary", b"\x00\xff\\"),
    ("'a\u00e4\U0001f680'::text", "string", "a\u00e4\U0001f680"),
    ("'x  '::char(5)", "string", "x"),
    ("'y'::varchar(3)", "string", "y"),
    ("'n'::name", "string", "n"),
    ("12.5::numeric(12, 2)", "decimal(12,2)", Decimal("12.50")),
    ("'-0.01'::numeric(12, 2)", "decimal(12,2)", Decimal("-0.01")),
    ("(10::numeric ^ 38 - 1)::numeric(38, 0)", "decimal(38,0)", Decimal("9" * 38)),
    ("(-(10::numeric ^ 38 - 1))::numeric(38, 0)", "decimal(38,0)", Decimal("-" + "9" * 38)),
    (f"'0.{'9' * 38}'::numeric(38, 38)", "decimal(38,38)", Decimal(f"0.{'9' * 38}")),
    ("1.5::numeric", "decimal(38,18)", Decimal("1.5")),
    ("NULL::numeric", "decimal(38,18)", None),
    ("1e19::numeric", "decimal(38,18)", Decimal(10) ** 19),
    ("1e30::numeric", "decimal(38,7)", Decimal(10) ** 30),
    (f"'{'9' * 38}'::numeric", "decimal(38,0)", Decimal("9" * 38)),
    (f"'-{'9' * 21}.5'::numeric", "decimal(38,17)", Decimal(f"-{'9' * 21}.5")),
    ("'1e-30'::numeric", "decimal(38,30)", Decimal("1e-30")),
    ("'1e-38'::numeric", "decimal(38,38)", Decimal("1e-38")),
    ("1::numeric / 3", "decimal(38,20)", Decimal("0." + "3" * 20)),
    ("1.5::numeric(50, 20)", "decimal(38,18)", Decimal("1.5")),
    ("12300::numeric(3, -2)", "decimal(5,0)", Decimal(12300)),
    ("0.00123::numeric(3, 5)", "decimal(5,5)", Decimal("0.00123")),
    ("100.000000000000000000000000::numeric", "decimal(38,18)", Decimal(100)),
    ("date '2026-01-02'", "date", date(2026, 1, 2)),
    ("date '0001-01-01'", "date", date.min),
    ("date '9999-12-31'", "date", date.max),
    ("timestamp '2026-01-02 12:00:00.123456'", "timestamp_ntz", UTC_NOON.replace(tzinfo=None)),
    ("timestamp '0001-01-01'", "timestamp_ntz", FIRST.replace(tzinfo=None)),
    ("timestamp '9999-12-31 23:59:59.999999'", "timestamp_ntz", LAST.replace(tzinfo=None)),
    ("timestamptz '2026-01-02 14:00:00.123456+02'", "timestamp", UTC_NOON),
    ("timestamptz '0001-01-01 00:00+00'", "timestamp", FIRST),
    ("time '24:00:00'", "string", "24:00:00"),
    ("timetz '01:02:03.5+02'", "string", "01:02:03.5+02"),
    ("interval '-1 day 2 hours 3.5 seconds'", "string", "P-1DT2H3.5S"),
    ("'8f14e45f-ceea-467f-a9d8-9c0a1b2c3d4e'::uuid", "string", "8f14e45f-ceea-467f-a9d8-9c0a1b2c3d4e"),
    ("""'{"b": 1.10, "a": [null]}'::jsonb""", "string", '{"a": [null], "b": 1.10}'),
    ("""'{"b":1,  "b":2}'::json""", "string", '{"b":1,  "b":2}'),
    ("ARRAY[0.1::float8 + 0.2, NULL]", "string", "{0.30000000000000004,NULL}"),
    ("ARRAY[timestamptz '2026-01-02 12:00+00']", "string", '{"2026-01-02 12:00:00+00"}'),
    ("ROW(date '2026-01-02', 'a,b')", "string", '(2026-01-02,"a,b")'),
    ("'[1,5)'::int4range", "string", "[1,5)"),
    ("'10.0.0.1/8'::inet", "string", "10.0.0.1/8"),
    ("B'0101'", "string", "0101"),
    ("'1234.56'::money", "string", "$1,234.56"),
    ("'(1.5,2)'::point", "string", "(1.5,2)"),
    ("4294967295::oid", "string", "4294967295"),
    ("'18446744073709551615'::xid8", "string", "18446744073709551615"),
    ("0.5::penstock_share", "decimal(5,4)", Decimal("0.5")),
    ("'b'::penstock_colour", "string", "b"),
]  # fmt: skip

REFUSED = [
    *("'NaN'::numeric", "'NaN'::numeric(12, 2)", "'Infinity'::numeric", "'-Infinity'::numeric"),
    *("1e38::numeric", f"'{'9' * 39}'::numeric(39, 0)", "'1e-39'::numeric", "'1e100'::numeric"),
    *(f"'{'1' * 21}.{'1' * 18}'::numeric", "1e30::numeric + '1e-20'"),
    *(f"'{sign}infinity'::{kind}" for kind in ("date", "timestamp", "timestamptz") for sign in ("", "-")),
    *("date '0001-12-31 BC'", "date '10000-01-01'", "date '5874897-12-31'"),
    *("timestamp '0001-12-31 23:59:59.999999 BC'", "timestamp '10000-01-01'"),
    *("timestamp '294276-12-31 23:59:59.999999'", "timestamptz '4714-11-24 00:00 BC'"),
    "timestamptz '294276-12-31 23:59+00'",
]


@pytest.fixture(scope="module")
def values_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database in which every setting that changes the text of a value has an unusual value."""
    url = postgres.create_database("unusual_values")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE DOMAIN penstock_share AS numeric(5, 4)")
        connection.execute("CREATE TYPE penstock_colour AS ENUM ('a', 'b')")
        set_unusual(connection, default_transaction_isolation="serializable")
    yield url
    postgres.drop_database("unusual_values")


@pytest.mark.parametrize(("expression", "type_", "value"), EXACT, ids=[e for e, _, _ in EXACT])
def test_a_value_arrives_exactly(values_url: str, expression: str, type_: str, value: Any) -> None:
    """Guarantee 22, whatever the formats of the role or the database."""
    assert read_value(values_url, expression) == (type_, value)


@pytest.mark.parametrize("expression", REFUSED)
def test_a_value_that_spark_does_not_have_is_refused_by_name_or_read_as_text(values_url: str, expression: str) -> None:
    """Guarantee 22."""
    with pytest.raises(UnreadableValue, match="column 'x' has a value that Spark's"):
        read_value(values_url, expression)
    with psycopg.connect(values_url) as connection:
        connection.execute("SET DateStyle = 'ISO, YMD'; SET TimeZone = 'UTC'")
        row = connection.execute(f"SELECT ({expression})::text".encode()).fetchone()

    assert read_value(values_url, expression, textColumns="x") == ("string", *(row or ()))
    assert read_value(values_url, expression, textColumns="*") == ("string", *(row or ()))


def test_not_a_number_is_a_float(values_url: str) -> None:
    type_, value = read_value(values_url, "'NaN'::float8")

    assert (type_, isnan(value)) == ("double", True)


@pytest.mark.parametrize("name", ["a`b", "a.b", 'a"b', "a,b", " a ", "A", "ä", "a\\b", "%s", "x" * 63])
def test_a_column_may_have_any_name(values_url: str, name: str) -> None:
    query = sql.SQL("SELECT 1.5::numeric AS {n}, 2 AS other").format(n=sql.Identifier(name))
    names = '["' + name.replace("\\", "\\\\").replace('"', '\\"') + '"]'

    table = read(values_url, query=query.as_string(None), columns=names, textColumns=names)

    assert table.to_pydict() == {name: ["1.5"]}


def test_a_table_may_have_any_name(connection: Connection, database_url: str) -> None:
    connection.execute('CREATE TABLE public."a.b, `c" AS SELECT 7 AS x')

    table = read(database_url, table='["public", "a.b, `c"]')

    assert table.to_pydict() == {"x": [7]}


def test_a_schema_of_the_readers_own_chooses_the_types(values_url: str) -> None:
    query = "SELECT 1.50::numeric AS cents, 'infinity'::timestamptz AS at, 7 AS id"

    table = read(
        values_url, StructType().add("id", "integer").add("at", "string").add("cents", DecimalType(20, 2)), query=query
    )

    assert table.to_pylist() == [{"id": 7, "at": "infinity", "cents": Decimal("1.50")}]
    with pytest.raises(UnreadableValue, match="column 'cents'"):
        read(values_url, StructType().add("cents", DecimalType(20, 0)), query=query)
    with pytest.raises(InvalidSetting, match="'id' cannot be read as bigint"):
        read(values_url, StructType().add("id", "long"), query=query)


NUMBERS = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=True),
    st.just(Decimal("NaN")),
    st.integers(-(10**45), 10**45).map(Decimal),
    st.tuples(st.integers(-(10**40), 10**40), st.integers(-45, 20)).map(
        lambda parts: Decimal((parts[0] < 0, Decimal(abs(parts[0])).as_tuple().digits, parts[1]))
    ),
).filter(lambda number: not number.is_finite() or abs(number.adjusted()) < 60)


@settings(max_examples=12)
@given(st.lists(NUMBERS, min_size=1, max_size=30))
@example([Decimal("1e30")])
@example([Decimal("1e30"), Decimal("1e-20")])
def test_numbers_arrive_exactly_or_not_at_all(values_url: str, numbers: list[Decimal]) -> None:
    """Guarantee 22: no digit is lost or invented, with declared and with undeclared precision."""
    listed = ", ".join(f"('{number}'::numeric)" for number in numbers)
    query = f"SELECT x FROM (VALUES {listed}) v (x)"
    fits = _fits(numbers)

    def same(found: list[Any]) -> bool:
        return sorted(map(Decimal, found)) == sorted(numbers)

    try:
        assert same(read(values_url, query=query).column("x").to_pylist())
        assert fits
    except UnreadableValue:
        assert not fits
    with suppress(UnreadableValue):
        assert same(read(values_url, StructType().add("x", DecimalType(38, 18)), query=query).column("x").to_pylist())
    texts = read(values_url, query=query, textColumns="x").column("x").to_pylist()
    assert sorted(texts) == sorted(map(_plain, numbers))


@given(st.lists(NUMBERS | st.none(), max_size=30), st.integers(1, 38), st.integers(0, 38))
@example([Decimal(10) ** 30], 38, 18)
@example([Decimal(48930623119825515241071592)], 38, 18)
@example([Decimal((2**256 + 5 * 10**18) // 10**18)], 38, 18)
@example([Decimal(2**256 // 10**38 + 1)], 38, 38)
@example([Decimal(2**256 + 5)], 38, 0)
@example([Decimal(f"0.{2**256 + 5:0100}")], 38, 38)
def test_text_becomes_exactly_this_decimal_or_is_refused(
    numbers: list[Decimal | None], digits: int, places: int
) -> None:
    """Guarantee 22: Arrow's own cast wraps around when it meets more digits than its type holds."""
    places = min(places, digits)
    texts = [None if number is None else _plain(number) for number in numbers]
    field = Field.parse(PostgresColumn("x", "numeric"), DecimalType(digits, places))
    limit = Decimal(10) ** (digits - places)
    fits = all(n is None or (n.is_finite() and abs(n) < limit and _places(n) <= places) for n in numbers)

    if fits:
        assert field.convert(pa.array(texts, pa.string())).to_pylist() == numbers
    else:
        with pytest.raises(UnreadableValue, match="column 'x'"):
            field.convert(pa.array(texts, pa.string()))


def _places(number: Decimal) -> int:
    return len(_plain(number).partition(".")[2])


def _fits(numbers: list[Decimal]) -> bool:
    if not all(number.is_finite() for number in numbers):
        return False
    texts = [_plain(number).lstrip("-").partition(".") for number in numbers]
    before = max(len(whole.lstrip("0")) for whole, _, _ in texts)
    return fitting_decimal(before, max(len(after) for _, _, after in texts)) is not None


def _plain(number: Decimal) -> str:
    if not number.is_finite():
        return str(number)
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


@settings(max_examples=12)
@given(st.lists(st.integers(-210_866_803_200_000_000, 9_224_318_015_999_999_999), min_size=1, max_size=5))
@example([-62_135_596_800_000_001])
@example([253_402_300_800_000_000])
def test_times_arrive_exactly_or_not_at_all(values_url: str, micros: list[int]) -> None:
    """Guarantee 22: over the whole range of Postgres."""
    listed = ", ".join(
        f"(timestamptz 'epoch' + '{n // DAY} days'::interval + '{n % DAY} microseconds'::interval)" for n in micros
    )
    query = f"SELECT x, x AT TIME ZONE 'UTC' AS y FROM (VALUES {listed}) v (x)"
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    try:
        expected = [epoch + n * MICROSECOND for n in micros]
    except OverflowError:
        with pytest.raises(UnreadableValue, match="column 'x'"):
            read(values_url, query=query)
        with pytest.raises(UnreadableValue, match="column 'y'"):
            read(values_url, query=query, textColumns="x")
        return
    table = read(values_url, query=query)
    assert table.column("x").to_pylist() == expected
    assert table.column("y").to_pylist() == [at.replace(tzinfo=None) for at in expected]


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_text_of_a_database_in_another_encoding(postgres: EmbeddedPostgres, encoding: str) -> None:
    """It need not be Penstock's database, which is in UTF8."""
    name = f"table_in_{encoding.lower()}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LOCALE 'C'".encode())
    try:
        url = postgres.database_url(name)
        assert read_value(url, "1e30::numeric")[1] == Decimal("1e30")
        if encoding == "LATIN1":
            assert read_value(url, "chr(228)") == ("string", "\u00e4")
        else:
            with pytest.raises(OSError, match="invalid byte sequence"):
                read_value(url, "chr(228)")
    finally:
        postgres.drop_database(name)


MOVING = "UPDATE public.moving SET value = value + 1"


@pytest.fixture
def moving(connection: Connection) -> Connection:
    """A table of many pages, whose rows move when they are updated."""
    connection.execute(
        "CREATE TABLE public.moving AS SELECT i AS id, 0 AS value, repeat('x', 100) AS filler FROM generate_series(1, 20000) i"
    )
    return connection


def read_while_rows_move(moving: Connection, reader: Any) -> list[int]:
    """Reads slice by slice; all rows are updated after each."""
    ids: list[int] = []
    for part in reader.partitions():
        ids += [i for batch in reader.read(part) for i in batch.column(0).to_pylist()]
        moving.execute(MOVING)
    return ids


def make_reader(database_url: str, **options: str) -> Any:
    source = TableDataSource({"databaseUrl": database_url, "table": "public.moving", "columns": "id", **options})
    return source.reader(source.schema())


def test_a_table_that_changes_is_read_in_one_state_by_default(moving: Connection, database_url: str) -> None:
    """Guarantee 28: no row is lost or doubled because it moved to another slice."""
    ids = read_while_rows_move(moving, make_reader(database_url))

    assert sorted(ids) == list(range(1, 20001))


@pytest.mark.parametrize("options", [{}, {"partitionColumn": "value"}, {"partitions": "7"}])
def test_slices_are_read_in_one_snapshot(moving: Connection, database_url: str, options: dict[str, str]) -> None:
    """Guarantee 28."""
    with snapshot(database_url) as name:
        reader = make_reader(database_url, snapshot=name, **options)
        ids = read_while_rows_move(moving, reader)

    assert sorted(ids) == list(range(1, 20001))
    with pytest.raises(SnapshotLost):
        read_while_rows_move(moving, reader)


def test_a_table_that_is_rewritten_between_two_slices_is_not_read_on(moving: Connection, database_url: str) -> None:
    """Guarantee 28: after VACUUM FULL, rows are at other positions, in every snapshot."""
    moving.execute("DELETE FROM public.moving WHERE id <= 10000")
    with snapshot(database_url) as name:
        reader = make_reader(database_url, snapshot=name)
        first, *_, last = reader.partitions()
        list(reader.read(first))
        moving.execute("VACUUM FULL public.moving")
        with pytest.raises(SnapshotLost, match="was rewritten while it was read"):
            list(reader.read(last))


def test_a_snapshot_of_another_database_is_not_reported_as_lost(database_url: str, postgres: EmbeddedPostgres) -> None:
    with (
        snapshot(postgres.url) as name,
        pytest.raises(psycopg.errors.FeatureNotSupported, match="from a different database"),
    ):
        TableDataSource({"databaseUrl": database_url, "query": "SELECT 1", "snapshot": name}).schema()


def test_a_snapshot_leaves_the_errors_of_its_block_alone(database_url: str) -> None:
    with pytest.raises(psycopg.OperationalError, match="mine"), snapshot(database_url):
        raise psycopg.OperationalError("mine")
    with pytest.raises(PenstockError), snapshot(database_url.replace("port=", "port=1")):
        pass
