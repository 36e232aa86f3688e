"""``penstock.table``: any table or query of Postgres, in parallel, in a given snapshot, in Arrow.

A table is divided by the position of its rows on disk, which needs no key and no statistics; a query is divided by the values
of a column, if one is given.  All tasks see the same state only in a given ``snapshot``, such as a cut's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from penstock.database.connections import TableConnection
from penstock.database.errors import postgres_errors
from penstock.errors import InvalidSetting, SnapshotLost, Unknown
from penstock.spark.sources.connections import arrow, postgres, warm
from penstock.spark.sources.narrowing import to_sql_condition
from penstock.spark.sources.options import database_url, known_options, whole_number

PARTITIONS = 4
"""Least number of slices, if it is not given."""
SLICE_BYTES = 128 * 1024 * 1024
"""Size of a slice of a large table, in bytes, if the number of slices is not given."""
_TID_RANGES_SINCE = 140000
_DECIMAL_DIGITS, _DECIMAL_PLACES = 38, 18

KNOWN = {
    "table",
    "query",
    "columns",
    "where",
    "snapshot",
    "partitions",
    "partitioncolumn",
    "databaseurl",
}


@dataclass(frozen=True, slots=True)
class Field:
    """A column: its expression in Postgres, and its types in Arrow and Spark.

    Attributes:
        name: Its name.
        expression: The SQL expression that is selected.
        type: Its type in Arrow.
        spark: Its type in Spark.
    """

    name: str
    expression: str
    type: pa.DataType
    spark: str


@dataclass(frozen=True)
class Slice(InputPartition):
    """What one task reads: the rows that meet the condition."""

    condition: str


class TableSource(DataSource):
    """``penstock.table``: reads a table or a query."""

    @classmethod
    def name(cls) -> str:
        """Its name for ``format``."""
        return "penstock.table"

    def schema(self) -> str:
        """The columns of the table or query; types that Spark does not have become text."""
        return ", ".join(
            f"`{field.name}` {field.spark}" for field in _Relation.parse(self.options).fields
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader, for the requested columns."""
        return TableReader(_Relation.parse(self.options), schema.names)


@dataclass(frozen=True)
class _Relation:
    """The table or query to read, and its columns."""

    source: str
    fields: tuple[Field, ...]
    options: Mapping[str, str]
    table: str | None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "_Relation":
        """Reads the columns from Postgres.

        Raises:
            InvalidSetting: An option is unknown, missing, or has an invalid value.
            Unknown: There is no such table or column.
            ServerUnavailable: Postgres does not answer.
        """
        options = known_options("penstock.table", given, KNOWN)
        if ("table" in options) == ("query" in options):
            raise InvalidSetting("penstock.table: give one of the options table and query")
        table = _quoted(options["table"]) if "table" in options else None
        source = table or f"({options['query']}) AS q"
        url = database_url("penstock.table", options.get("databaseurl"))
        connection = postgres(url, TableConnection)
        wanted = options.get("columns")
        names = "*" if wanted is None else ", ".join(map(_identifier, wanted.split(",")))
        with postgres_errors("reading the columns of a table"):
            try:
                described = connection.execute(f"SELECT {names} FROM {source} LIMIT 0".encode())
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
                raise Unknown(f"penstock.table: {str(error).splitlines()[0]}") from error
        fields = tuple(_field(column) for column in described.description or ())
        return cls(source, fields, options, table)


class TableReader(DataSourceReader):
    """Reads in slices; every task opens its own transaction, in the snapshot if one is given."""

    def __init__(self, relation: _Relation, names: Sequence[str]) -> None:
        known = {field.name: field for field in relation.fields}
        missing = [name for name in names if name not in known]
        if missing:
            raise Unknown(f"penstock.table: there is no column {missing[0]!r}")
        self._fields = [known[name] for name in names]
        self._relation = relation
        options = relation.options
        self._url = database_url("penstock.table", options.get("databaseurl"))
        self._count = whole_number("penstock.table", options, "partitions", "partitions")
        self._conditions = [options.get("where", "true")]

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Applies filters in Postgres where it compares as Spark does; Spark applies all of them again."""
        columns = {field.name: (field.expression, field.spark) for field in self._fields}
        conditions = (to_sql_condition(given, columns) for given in filters)
        self._conditions += [condition for condition in conditions if condition is not None]
        return filters

    def partitions(self) -> list[InputPartition]:
        """Slices of about the same size."""
        connection = postgres(self._url, TableConnection)
        column = self._relation.options.get("partitioncolumn")
        with postgres_errors("dividing a table"):
            if column is not None:
                return list(
                    _by_column(
                        connection, self._relation, _identifier(column), self._count or PARTITIONS
                    )
                )
            if self._relation.table is not None:
                return list(_by_position(connection, self._relation.table, self._count))
        return [Slice("true")]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a slice.

        Raises:
            SnapshotLost: The snapshot is gone: the transaction that held it has ended, or Postgres was restarted.
        """
        assert isinstance(partition, Slice)
        warm()
        expressions = ", ".join(f"{f.expression} AS {_identifier(f.name)}" for f in self._fields)
        conditions = " AND ".join(f"({c})" for c in (partition.condition, *self._conditions))
        query = f"SELECT {expressions} FROM {self._relation.source} WHERE {conditions}"
        schema = pa.schema([(field.name, field.type) for field in self._fields])
        with arrow(self._url, TableConnection, self._enter_snapshot) as cursor:
            cursor.execute(query)
            for batch in cursor.fetch_record_batch():
                if batch.num_rows:
                    columns = [
                        _as(a, f.type) for a, f in zip(batch.columns, self._fields, strict=True)
                    ]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _enter_snapshot(self, cursor: Any) -> None:
        snapshot = self._relation.options.get("snapshot")
        if snapshot is None:
            return
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            cursor.execute(f"SET TRANSACTION SNAPSHOT {_literal(snapshot)}")
        except Exception as error:
            raise SnapshotLost(
                f"penstock.table: snapshot {snapshot} is gone: the transaction that held it has ended, or Postgres was restarted. "
                "Begin again with another cut"
            ) from error


def _by_position(connection: Any, table: str, count: int | None) -> Iterator[Slice]:
    """Slices by position on disk.  If the table has grown since the snapshot, its new rows are not part of it."""
    # By the role's search_path, which no other function may be found by.
    [(kind, has_children, size, page)] = connection.execute(
        "SELECT relkind::text, relhassubclass, pg_catalog.pg_relation_size(oid::pg_catalog.regclass), "
        "pg_catalog.current_setting('block_size')::bigint "
        "FROM pg_catalog.pg_class WHERE oid OPERATOR(pg_catalog.=) (%s::pg_catalog.regclass)::pg_catalog.oid",
        (table,),
    ).fetchall()
    if kind not in {"r", "m"} or has_children or connection.info.server_version < _TID_RANGES_SINCE:
        yield Slice("true")
        return
    count, pages = count or max(PARTITIONS, size // SLICE_BYTES), size // page
    edges = sorted({pages * part // count for part in range(1, count)} - {0})
    bounds = [0, *edges]
    for number, begin in enumerate(bounds):
        end = f" AND ctid < '({bounds[number + 1]},0)'" if number + 1 < len(bounds) else ""
        yield Slice(f"ctid >= '({begin},0)'{end}")


def _by_column(connection: Any, relation: _Relation, column: str, count: int) -> Iterator[Slice]:
    """Slices by the values of a column; the first and the last are open-ended, so that they cover every row."""
    query = f"SELECT DISTINCT pg_catalog.percentile_disc({{}}) WITHIN GROUP (ORDER BY {column})::text FROM {relation.source}"
    edges: list[str] = []
    for part in range(1, count):
        [(edge,)] = connection.execute(query.format(part / count).encode()).fetchall()
        if edge is not None and edge not in edges:
            edges.append(edge)
    begin = None
    for end in [*map(_literal, edges), None]:
        low = "true" if begin is None else f"{column} >= {begin}"
        high = f"{column} < {end}" if end is not None else "true"
        nulls = f" OR {column} IS NULL" if begin is None else ""
        yield Slice(f"({low} AND {high}){nulls}")
        begin = end


def _field(column: Any) -> Field:
    """The types of a column, by its type in Postgres."""
    name = _identifier(column.name)
    oid = column.type_code
    plain: dict[int, tuple[pa.DataType, str]] = {
        16: (pa.bool_(), "boolean"),
        17: (pa.binary(), "binary"),
        20: (pa.int64(), "bigint"),
        21: (pa.int16(), "smallint"),
        23: (pa.int32(), "int"),
        700: (pa.float32(), "float"),
        701: (pa.float64(), "double"),
        1082: (pa.date32(), "date"),
        1114: (pa.timestamp("us"), "timestamp_ntz"),
        1184: (pa.timestamp("us", tz="UTC"), "timestamp"),
    }
    if oid in plain:
        return Field(column.name, name, *plain[oid])
    if oid == psycopg.postgres.types["numeric"].oid:
        digits, places = column.precision or _DECIMAL_DIGITS, column.scale
        if places is None or column.precision is None or digits > _DECIMAL_DIGITS:
            digits, places = _DECIMAL_DIGITS, _DECIMAL_PLACES
        return Field(
            column.name,
            f"{name}::text",
            pa.decimal128(digits, places),
            f"decimal({digits},{places})",
        )
    return Field(column.name, f"{name}::text", pa.string(), "string")


def _as(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    return values if values.type == wanted else values.cast(wanted)


def _quoted(name: str) -> str:
    return ".".join(_identifier(part) for part in name.split("."))


def _identifier(name: str) -> str:
    return sql.Identifier(name.strip()).as_string(None)


def _literal(text: str) -> str:
    return sql.Literal(text).as_string(None)
