"""What Postgres does for ``penstock.table``: slices, and its connections' name."""

from itertools import pairwise
from typing import Any

import pytest

from fixtures.constants import SetConstants
from penstock.database.connections import Connection, name_application
from penstock.errors import InvalidSetting, PenstockError, SnapshotLost, Unknown
from penstock.records import Offset, Shard, ShardName
from penstock.spark import snapshot
from penstock.spark.sources import table_reader
from penstock.spark.sources.source_options import Options
from penstock.spark.sources.stream_position import RegisteredPosition
from penstock.spark.sources.table_reader import TableDataSource, TableReader, _divide_pages

pytestmark = pytest.mark.slow  # a hundred tasks, each with its own connections


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
    connection: Connection, database_url: str, set_constants: SetConstants
) -> None:
    set_constants("spark.sources.table_reader", SAMPLE_BYTES=500_000)
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

    assert batch.column("name").to_pylist() == [name_application("spark")]


RELATIONS = {
    "table": (["CREATE TABLE public.kinds AS {rows}"], 5),
    "unlogged": (["CREATE UNLOGGED TABLE public.kinds AS {rows}"], 5),
    "materialised view": (["CREATE MATERIALIZED VIEW public.kinds AS {rows}"], 5),
    "partitioned": (
        [
            "CREATE TABLE public.kinds (i int, t text) PARTITION BY RANGE (i)",
            "CREATE TABLE public.low PARTITION OF public.kinds FOR VALUES FROM (0) TO (300)",
            "CREATE TABLE public.high PARTITION OF public.kinds FOR VALUES FROM (300) TO (9000) PARTITION BY HASH (i)",
            "CREATE TABLE public.h0 PARTITION OF public.high FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
            "CREATE TABLE public.h1 PARTITION OF public.high FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
            "CREATE TABLE public.rest PARTITION OF public.kinds DEFAULT",
            "INSERT INTO public.kinds {rows}",
        ],
        5,
    ),
    "without partitions": (["CREATE TABLE public.kinds (i int, t text) PARTITION BY LIST (i)"], 1),
    "partition": (
        [
            "CREATE TABLE public.whole (i int, t text) PARTITION BY HASH (i)",
            "CREATE TABLE public.kinds PARTITION OF public.whole FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
            "INSERT INTO public.kinds {rows}",
        ],
        5,
    ),
    "inherited": (
        [
            "CREATE TABLE public.kinds (i int, t text)",
            "CREATE TABLE public.child () INHERITS (public.kinds)",
            "INSERT INTO public.child {rows}",
        ],
        1,
    ),
    "view": (["CREATE TABLE public.base AS {rows}", "CREATE VIEW public.kinds AS TABLE public.base"], 1),
    "empty": (["CREATE TABLE public.kinds (i int, t text)"], 1),
}


@pytest.mark.parametrize(("statements", "tasks"), RELATIONS.values(), ids=RELATIONS.keys())
def test_a_relation_of_any_kind_is_read_once_and_divided_if_it_can_be(
    connection: Connection, database_url: str, caplog: pytest.LogCaptureFixture, statements: list[str], tasks: int
) -> None:
    """Guarantee 28."""
    for statement in statements:
        rows = "SELECT i, repeat('x', 100) AS t FROM generate_series(1, 9999) i"
        connection.execute(statement.format(rows=rows).encode())
    [(expected,)] = connection.execute("SELECT coalesce(array_agg(i ORDER BY i), '{}') FROM public.kinds").fetchall()

    with snapshot(database_url) as name:
        reader = make_reader(database_url, snapshot=name, partitions="5", columns="i")
        slices = [[i for b in reader.read(p) for i in b.column(0).to_pylist()] for p in reader.partitions()]

    assert sorted(i for each in slices for i in each) == expected
    assert len(slices) == tasks
    assert max(map(len, slices)) < 3000 or tasks == 1
    assert ("is read by one task" in caplog.text) == ("INHERITS" in str(statements) or "VIEW" in statements[-1][:12])


@pytest.mark.parametrize("change", ["DETACH PARTITION public.k1", "ATTACH PARTITION public.k3 FOR VALUES IN (3)"])
def test_a_partition_that_comes_or_goes_between_two_slices_is_noticed(
    connection: Connection, database_url: str, change: str
) -> None:
    """Guarantee 28: Postgres reads the partitions of now, in every snapshot."""
    connection.execute("CREATE TABLE public.kinds (i int) PARTITION BY LIST (i)")
    for number in (1, 2):
        connection.execute(f"CREATE TABLE public.k{number} PARTITION OF public.kinds FOR VALUES IN ({number})".encode())
    connection.execute("CREATE TABLE public.k3 (i int)")
    connection.execute("INSERT INTO public.kinds SELECT 1 + i % 2 FROM generate_series(1, 5000) i")

    with snapshot(database_url) as name:
        reader = make_reader(database_url, snapshot=name)
        first, *_, last = reader.partitions()
        list(reader.read(first))
        connection.execute(f"ALTER TABLE public.kinds {change}".encode())
        with pytest.raises(SnapshotLost, match="a partition that was added or removed"):
            list(reader.read(last))


def test_slices_by_place_have_as_many_pages_of_all_files_together() -> None:
    assert _divide_pages([100], 4) == [0, 25, 50, 75]
    assert _divide_pages([], 4) == _divide_pages([0, 0], 4) == [0]
    edges = _divide_pages([10, 1000, 500], 5)
    pages = [
        sum(min(size, end) - min(size, begin) for size in (10, 1000, 500)) for begin, end in pairwise([*edges, 1000])
    ]
    assert all(abs(each - 302) <= 3 for each in pages)


ORDERLESS = ["json", "point", "box", "circle", "line", "lseg", "path", "polygon", "jsonpath", "xid", "int[]", "json[]"]
ORDERED = [
    *("int", "numeric", "float8", "text", "char(3)", "name", "date", "timestamptz", "interval", "uuid", "bytea", "boolean"),
    *("inet", "jsonb", "bit(3)", "money", "int4range", "mood", "pair", "oid", "tsvector", "pg_lsn", "time"),
]  # fmt: skip


@pytest.mark.parametrize("type_", [*ORDERLESS, *ORDERED])
def test_rows_are_divided_by_a_column_of_any_type_with_an_order(
    connection: Connection, database_url: str, type_: str
) -> None:
    connection.execute("CREATE TYPE public.mood AS ENUM ('a', 'b')")
    connection.execute("CREATE TYPE public.pair AS (a int, b text)")
    connection.execute(f"CREATE TABLE public.kinds (id int, by {type_})".encode())
    connection.execute("INSERT INTO public.kinds SELECT i FROM generate_series(1, 9) i")

    with snapshot(database_url) as name:
        reader = make_reader(database_url, snapshot=name, partitionColumn="by")
        if type_ in ORDERLESS:
            with pytest.raises(InvalidSetting, match="partitionColumn 'by' has a type that cannot divide rows"):
                reader.partitions()
        else:
            assert sum(b.num_rows for p in reader.partitions() for b in reader.read(p)) == 9


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (Unknown, {"partitionColumn": "nothing"}),
        (Unknown, {"where": "nothing > 1"}),
        (Unknown, {"where": "nothing(id) > 1"}),
        (InvalidSetting, {"where": "id >"}),
        (InvalidSetting, {"table": "", "query": "SELEC 1"}),
        (Unknown, {"table": "", "query": "SELECT 1 = 'a'::text"}),
    ],
)
def test_an_error_of_a_query_is_its_own_and_no_missing_schema(
    connection: Connection, database_url: str, error: type[PenstockError], options: dict[str, str]
) -> None:
    connection.execute("CREATE TABLE public.kinds (id int)")
    given = {name: text for name, text in {"table": "public.kinds", **options}.items() if text}

    def plan(name: str) -> None:
        source = TableDataSource({"databaseUrl": database_url, "snapshot": name, **given})
        source.reader(source.schema()).partitions()

    with snapshot(database_url) as name, pytest.raises(error, match=r"^penstock\.table: ") as raised:
        plan(name)

    assert "penstock init" not in str(raised.value)


def test_a_connection_that_was_closed_while_it_was_idle_is_opened_again(
    connection: Connection, database_url: str
) -> None:
    """Guarantee 36: a server, a pooler or an administrator closes it between two plans, or two micro-batches."""
    connection.execute("CREATE TABLE public.kinds AS SELECT 1 AS id")
    options = {"channel": "things", "databaseUrl": database_url, "shards": "1", "consumer": "archive"}
    position = RegisteredPosition(Options.parse("penstock.log", options, streaming=True))
    shard = ShardName("things", Shard(0))

    for offset in range(3):
        reader = make_reader(database_url)
        assert [b.num_rows for p in reader.partitions() for b in reader.read(p)] == [1]
        position.follow({shard: Offset(offset)})
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    assert position.read() == {shard: 2}
