"""``penstock.table``: any table or query of Postgres in Arrow, in one snapshot.

All tasks must see one state.  Without a ``snapshot`` there is one task, whose statement has a
snapshot of its own.  With one, such as a cut's, tasks read in parallel: a table is divided by the
position of its rows on disk, which needs no key and no statistics; a query is divided by the values
of a column, if one is given.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.database.connections import TableConnection, connect_postgres
from penstock.database.driver_errors import first_line, postgres_errors
from penstock.database.query_text import condition, split_names, subquery
from penstock.database.statements import quote, quote_literal
from penstock.database.transactions import FIX_FORMATS, set_local
from penstock.errors import InvalidSetting, SnapshotLost, Unknown
from penstock.reconciling.cut import export_snapshot, import_snapshot
from penstock.spark.sources.column_types import (
    BOUNDED,
    Field,
    PostgresColumn,
    fitting_decimal,
    unreadable,
)
from penstock.spark.sources.data_sources import PenstockSource
from penstock.spark.sources.source_options import GivenOptions, ServerOptions
from penstock.spark.sources.task_process import arrow, one_line_errors, postgres, warm

log = logging.getLogger("penstock.spark")

SOURCE = "penstock.table"


@contextmanager
def snapshot(database_url: str) -> Iterator[str]:
    """Exports a snapshot for ``penstock.table`` and yields its name, valid until the block ends.

        with snapshot(url) as name:
            tables = spark.read.format("penstock.table").option("snapshot", name)
            rides = tables.option("table", "rides").load()
            rides.write.parquet("rides")

    Frames are lazy, so the action belongs into the block.  While it is open, Postgres cannot vacuum
    rows that are deleted.

    Args:
        database_url: The server that the tasks read: the primary, or a standby for standby reads.

    Raises:
        ServerUnavailable: Postgres does not answer.
    """
    with connect_postgres(database_url, application="snapshot", kind=TableConnection) as holder:
        with postgres_errors("exporting a snapshot"):
            # Not the connection's own cursor, which would send the settings before it.
            psycopg.Cursor(holder).execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            for statement in set_local(holder.settings):
                holder.execute(statement)
            name = export_snapshot(holder)
        try:
            yield name
        finally:
            holder.close()


def begin_reading(cursor: Any, snapshot: str | None) -> None:
    """Begins a task's transaction, in the snapshot if there is one, with fixed text formats.

    The cursor is one of psycopg or of ADBC, in a new transaction.
    """
    if snapshot is not None:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        import_snapshot(cursor, snapshot)
    cursor.execute(FIX_FORMATS.decode())
    cursor.fetchall()


PARTITIONS = 4
"""Default of the least number of slices."""
SLICE_BYTES = 128 * 1024 * 1024
"""Size of a slice of a large table, in bytes, if the number of slices is not given."""
SAMPLE_BYTES = 16 * 1024 * 1024
"""Size, in bytes, of the sample of a large table that is read to divide it by the values of a
column."""
_TID_RANGES_SINCE = 140000
_EVERY = "*"

KNOWN = (
    *("table", "query", "columns", "textColumns", "where"),
    *("snapshot", "partitions", "partitionColumn", "databaseUrl"),
)


@dataclass(frozen=True)
class TableSlice(InputPartition):
    """Rows that one task reads: those that meet the condition.

    They are valid as long as the table's file on disk is still this one.
    """

    condition: str
    file: int | None = None


@dataclass(frozen=True)
class TableRelation:
    """The table or query to read, and its columns."""

    source: str
    columns: tuple[PostgresColumn, ...]
    options: GivenOptions
    url: str
    table: str | None
    texts: frozenset[str]

    @classmethod
    def parse(cls, raw_options: Mapping[str, Any]) -> "TableRelation":
        """Returns the relation that the options name; reads its columns from Postgres."""
        options = GivenOptions(SOURCE, raw_options, KNOWN)
        if ("table" in options) == ("query" in options):
            raise options.error("give one of the options table and query")
        wants_several = "partitionColumn" in options or options.get("partitions", "1") != "1"
        if wants_several and "snapshot" not in options:
            raise options.error(
                "several tasks need a snapshot: each would see another state of the database, and "
                "rows that move between two "
                "reads would be lost or doubled. Give one: with penstock.spark.snapshot(url) as "
                "name, option snapshot=name"
            )
        url = ServerOptions(**ServerOptions.parse_servers(options)).database()
        table = quote(*_names(options, "table", ".")) if "table" in options else None
        source = table or subquery(options["query"])
        columns = _describe(options, url, source)
        texts = frozenset(_names(options, "textColumns"))
        _check_names(columns, texts)
        return cls(source, columns, options, url, table, texts)

    @property
    def snapshot(self) -> str | None:
        """Returns the snapshot to read in."""
        return self.options.get("snapshot")

    def is_text(self, column: PostgresColumn) -> bool:
        """Returns whether a column is read as text by choice."""
        return column.name in self.texts or (_EVERY in self.texts and column.kind in BOUNDED)

    def measured(self) -> list[PostgresColumn]:
        """Returns the columns; a numeric without declared precision gets that of its values."""
        wide = [
            column
            for column in self.columns
            if column.kind == "numeric" and column.decimal is None and not self.is_text(column)
        ]
        decimals = dict(zip((column.name for column in wide), self._measure(wide), strict=True))
        return [replace(c, decimal=decimals.get(c.name, c.decimal)) for c in self.columns]

    def _measure(self, columns: Sequence[PostgresColumn]) -> Iterator[tuple[int, int]]:
        if not columns:
            return
        widths = ", ".join(
            f"max(abs(trunc({c.identifier})))::text, max(scale(trim_scale({c.identifier})))"
            for c in columns
        )
        with reading(self.url, self.snapshot) as connection:
            [row] = connection.execute(
                f"SELECT {widths} FROM {self.source} WHERE {self.condition}".encode()
            ).fetchall()
        for number, column in enumerate(columns):
            integer_part, places = row[2 * number] or "0", row[2 * number + 1] or 0
            is_number = integer_part.isdigit()  # otherwise NaN or Infinity, which are the greatest
            fitting = fitting_decimal(len(integer_part.lstrip("0")), places) if is_number else None
            if fitting is None:
                raise unreadable(column.name, "decimal")
            yield fitting

    @property
    def condition(self) -> str:
        """Returns the option ``where``."""
        return _condition(self.options)


def _condition(options: GivenOptions) -> str:
    return condition(options.get("where") or "true")


def _describe(options: GivenOptions, url: str, source: str) -> tuple[PostgresColumn, ...]:
    names = ", ".join(map(quote, _names(options, "columns"))) if "columns" in options else "*"
    restriction = _condition(options)
    with reading(url, options.get("snapshot")) as connection:
        described = connection.execute(
            f"SELECT {names} FROM {source} WHERE {restriction} LIMIT 0".encode()
        )
        result = described.pgresult
        return tuple(
            PostgresColumn.parse(column, -1 if result is None else result.fmod(number))
            for number, column in enumerate(described.description or ())
        )


@contextmanager
def reading(url: str, snapshot: str | None) -> Iterator[Any]:
    """Opens the transaction that reads, in the snapshot if one is given; yields the connection."""
    connection = postgres(url, TableConnection)
    with postgres_errors("reading a table"), connection.transaction():
        with connection.cursor() as cursor:
            begin_reading(cursor, snapshot)
        try:
            yield connection
        except psycopg.errors.InsufficientPrivilege:
            raise
        except psycopg.ProgrammingError as error:  # of the options, whatever is missing
            is_missing = type(error).__name__.startswith("Undefined")
            raise (Unknown if is_missing else InvalidSetting)(
                f"penstock.table: {first_line(error)}"
            ) from error


def _check_names(columns: Sequence[PostgresColumn], texts: frozenset[str]) -> None:
    names = [column.name for column in columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidSetting(f"penstock.table: two columns are named {twice[0]!r}; give aliases")
    unknown = sorted(texts.difference(names, [_EVERY]))
    if unknown:
        raise Unknown(f"penstock.table: there is no column {unknown[0]!r}, named in textColumns")


class TableReader(DataSourceReader):
    """Reads in slices; every task opens its own transaction, in the snapshot if one is given."""

    def __init__(self, relation: TableRelation, schema: StructType) -> None:
        columns = {column.name: column for column in relation.columns}
        missing = [name for name in schema.names if name not in columns]
        if missing:
            raise Unknown(f"penstock.table: there is no column {missing[0]!r}")
        self._fields = [Field.parse(columns[field.name], field.dataType) for field in schema]
        self._relation = relation
        self._count = relation.options.whole_number("partitions")

    @one_line_errors()
    def partitions(self) -> list[InputPartition]:
        """Returns slices of about the same size; a single one without a snapshot."""
        relation = self._relation
        column = relation.options.get("partitionColumn")
        if relation.snapshot is None or (column is None and relation.table is None):
            return [TableSlice("true")]
        with reading(relation.url, relation.snapshot) as connection:
            if column is not None:
                return list(_by_column(connection, relation, column, self._count or PARTITIONS))
            return list(_by_position(connection, str(relation.table), self._count))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a slice."""
        assert isinstance(partition, TableSlice)
        warm()
        expressions = ", ".join(f"{f.expression} AS {quote(f.name)}" for f in self._fields)
        relation = self._relation
        matching = f"({partition.condition}) AND {relation.condition}"
        query = f"SELECT {expressions} FROM {relation.source} WHERE {matching}"
        schema = pa.schema([(field.name, field.type) for field in self._fields])
        begin = partial(begin_reading, snapshot=relation.snapshot)
        with one_line_errors(), arrow(relation.url, TableConnection, begin) as cursor:
            self._check_file(cursor, partition)
            cursor.execute(query)
            for batch in cursor.fetch_record_batch():
                if batch.num_rows:
                    columns = [
                        f.convert(a) for a, f in zip(batch.columns, self._fields, strict=True)
                    ]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _check_file(self, cursor: Any, partition: TableSlice) -> None:
        """Fails if the table was rewritten since it was divided: its rows have moved."""
        if partition.file is None:
            return
        table = str(self._relation.table)
        # locks it, as LOCK TABLE does not with a materialised view
        cursor.execute(f"SELECT 1 FROM {table} LIMIT 0")
        cursor.fetchall()
        cursor.execute(f"SELECT {_FILE.format(f'{quote_literal(table)}::regclass')}")
        [(file,)] = cursor.fetchall()
        if file != partition.file:
            raise SnapshotLost(
                f"penstock.table: {table} was rewritten while it was read (VACUUM FULL, CLUSTER, "
                "TRUNCATE, REFRESH, ALTER TABLE, or a "
                "partition that was added or removed). Begin again"
            )


_LEAVES = "pg_partition_tree({0}) t WHERE t.isleaf"
_FILE = (
    "hashtextextended(coalesce((SELECT string_agg(t.relid::oid || ':' || "
    "pg_relation_filenode(t.relid), ' ' ORDER BY t.relid::oid) "
    f"FROM {_LEAVES}), pg_relation_filenode({{0}})::text), 0)"
)
"""Number for a table's file on disk, or those of its partitions, which changes when one is
rewritten, added or removed."""


def _by_position(connection: Any, table: str, count: int | None) -> Iterator[TableSlice]:
    """Yields slices by position on disk; rows that are newer than the snapshot are not part of it.

    A slice has the pages of the same numbers of all partitions.
    """
    [(kind, has_children, has_foreign, sizes, page, file)] = connection.execute(
        "SELECT c.relkind::text, c.relhassubclass, "
        f"EXISTS (SELECT FROM pg_class l, {_LEAVES.format('c.oid')} AND l.oid = t.relid AND "
        "l.relkind <> 'r'), "
        f"coalesce((SELECT array_agg(pg_relation_size(t.relid)) FROM {_LEAVES.format('c.oid')}), "
        "ARRAY[pg_relation_size(c.oid)]), "
        f"current_setting('block_size')::bigint, {_FILE.format('c.oid')} FROM pg_class c WHERE "
        "c.oid = %s::regclass",
        (table,),
    ).fetchall()
    is_divisible = not has_foreign if kind == "p" else kind in {"r", "m"} and not has_children
    if not is_divisible or connection.info.server_version < _TID_RANGES_SINCE:
        # A view, a foreign table, a table with children by INHERITS, or Postgres 13.
        log.warning(
            "%s is read by one task: it cannot be divided by ctid; give partitionColumn", table
        )
        yield TableSlice("true")
        return
    edges = _divide_pages(
        [size // page for size in sizes], count or max(PARTITIONS, sum(sizes) // SLICE_BYTES)
    )
    for begin, end in pairwise([*edges, None]):
        high = "" if end is None else f" AND ctid < '({end},0)'"
        yield TableSlice(f"ctid >= '({begin},0)'{high}", file)


def _divide_pages(files: Sequence[int], count: int) -> list[int]:
    """Returns the first pages of slices that have as many pages of all files together."""
    ascending, edges = sorted(files), {0}
    for part in range(1, count):
        target, level = sum(files) * part // count, 0
        for number, size in enumerate(ascending):
            remaining = len(files) - number
            if (size - level) * remaining >= target:
                edges.add(level + target // remaining)
                break
            target -= (size - level) * remaining
            level = size
    return sorted(edges)


def _by_column(
    connection: Any, relation: TableRelation, column: str, count: int
) -> Iterator[TableSlice]:
    """Yields slices by the values of a column.

    The first and the last are open-ended, so that they cover every row.
    """
    try:
        values = _find_edges(connection, relation, quote(column), count)
    except (
        psycopg.errors.UndefinedFunction,
        psycopg.errors.UndefinedObject,
        psycopg.errors.SyntaxError,
    ) as error:
        raise InvalidSetting(
            f"penstock.table: partitionColumn {column!r} has a type that cannot divide rows: "
            f"{first_line(error)}. Take a column of "
            "numbers, times or text"
        ) from error
    edges, column = map(quote_literal, dict.fromkeys(values)), quote(column)
    for begin, end in pairwise([None, *edges, None]):
        low = "true" if begin is None else f"{column} >= {begin}"
        high = "true" if end is None else f"{column} < {end}"
        nulls = f" OR {column} IS NULL" if begin is None else ""
        yield TableSlice(f"({low} AND {high}){nulls}")


def _find_edges(connection: Any, relation: TableRelation, column: str, count: int) -> list[str]:
    """Returns values of a column that divide the rows, in order.

    Takes one sort for all of them, of a sample if the table is large: slices of unequal size cover
    every row as well.
    """
    fractions = ", ".join(str(part / count) for part in range(1, count))
    rows = connection.execute(
        f"""
        SELECT e.edge::text
        FROM (
            SELECT pg_catalog.percentile_disc('{{{fractions}}}'::float8[])
                   WITHIN GROUP (ORDER BY {column}) AS edges
            FROM {relation.source}{_sample(connection, relation)}
            WHERE {relation.condition}
        ) AS q, LATERAL unnest(q.edges) WITH ORDINALITY AS e (edge, n)
        WHERE e.edge IS NOT NULL
        ORDER BY e.n
        """.encode()
    ).fetchall()
    return [edge for (edge,) in rows]


def _sample(connection: Any, relation: TableRelation) -> str:
    if relation.table is None:
        return ""
    [(kind, size)] = connection.execute(
        "SELECT relkind::text, pg_relation_size(oid) FROM pg_class WHERE oid = %s::regclass",
        (relation.table,),
    ).fetchall()
    if kind not in {"r", "m"} or size <= SAMPLE_BYTES:
        return ""
    return f" TABLESAMPLE SYSTEM ({100 * SAMPLE_BYTES / size})"


def _names(options: GivenOptions, option: str, separator: str = ",") -> list[str]:
    """Returns names of columns, or the parts of a table's."""
    takes = f"names with {separator!r} between them, or a JSON list of names"
    return (
        options.parse(option, partial(split_names, separator=separator), takes)
        if option in options
        else []
    )


class TableDataSource(PenstockSource):
    """``penstock.table``: reads a table or a query; types that Spark does not have become text."""

    format_name = SOURCE

    def _columns(self) -> StructType:
        relation = TableRelation.parse(self.options)
        return StructType(
            [column.in_spark(text=relation.is_text(column)) for column in relation.measured()]
        )

    def _read(self, schema: StructType, raw_options: Mapping[str, str], *, streaming: bool) -> Any:
        if streaming:
            raise NotImplementedError
        return TableReader(TableRelation.parse(raw_options), schema)
