"""Stages the rows of a DataFrame as new records: ``df.write.format("penstock.staged")``.

Tasks check and encode the rows; the driver inserts them in one transaction, so that a micro-batch
is staged as a whole, and once: a repeated one finds its number.  All rows of a batch pass through
the driver.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructType, UserDefinedType

from penstock.database.connections import Connection, TableConnection, connect_postgres
from penstock.database.driver_errors import postgres_errors
from penstock.database.registry import registered_channels
from penstock.database.store import Store
from penstock.declaring.kinds import MAX_PAYLOAD_BYTES, LogChannel, checked_channel
from penstock.errors import InvalidRecord, InvalidSetting, Unknown
from penstock.parsing import parse_json
from penstock.spark.releases import TIME_TYPES, DataSourceStreamArrowWriter
from penstock.spark.sources.batch_content import QUERY_ID, combine, digest_texts
from penstock.spark.sources.exactly_once import DEFAULT_TABLE, DueBatch, claim, create_table
from penstock.spark.sources.source_options import GivenOptions, ServerOptions
from penstock.spark.sources.task_process import one_line_errors, warm
from penstock.staging.payload import headers_text, json_text, key_text, label_text
from penstock.staging.rows import insert_sql, make_refusal, split_rows

SOURCE = "penstock.staged"
KNOWN = ("channel", "name", "maxBytes", "batchTable", "namespace", "schema", "databaseUrl")
REQUIRED = ("key", "action", "object", "data")
HEADERS, CHANNEL = "headers", "channel"

STAGED: tuple[type[DataType], ...] = TIME_TYPES + (  # noqa: RUF005  mypy reads a list with a star as one of objects
    *(
        spark_types.NullType,
        spark_types.BooleanType,
        spark_types.NumericType,
        spark_types.DayTimeIntervalType,
    ),
    *(spark_types.StringType, spark_types.CharType, spark_types.VarcharType),
    *(spark_types.DateType, spark_types.TimestampType, spark_types.TimestampNTZType),
)
"""Types of single values that are staged as ``stage`` writes them."""


@dataclass
class Encoded(WriterCommitMessage):
    """Rows of a task as compressed JSON arrays, their digest, and the id of the streaming query.

    The id is empty in a batch.
    """

    query: str
    rows: list[bytes]
    digest: int


class _Stager:
    """Common part of the batch and the streaming writer."""

    def __init__(
        self, raw_options: Mapping[str, Any], schema: StructType, *, overwrite: bool
    ) -> None:
        options = GivenOptions(SOURCE, raw_options, KNOWN)
        if overwrite:
            raise InvalidSetting(f"{SOURCE}: records are added, never overwritten: mode('append')")
        check_columns(schema)
        servers = ServerOptions(**ServerOptions.parse_servers(options))
        self._scope, self._url = servers.scope, servers.database()
        self._channel = _channel(options, schema)
        self._name = options.get("name") or self._channel or ""
        self._table = options.get("batchTable") or DEFAULT_TABLE
        self._checkpoint = options.get("checkpointLocation")
        self._logs = self._find_logs(options.whole_number("maxBytes"))

    @one_line_errors()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Encoded:
        """Checks and encodes the rows of a task."""
        warm()
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(QUERY_ID)
        rows = [self._encode(row) for part in iterator for row in read_rows(part)]
        packed = [zlib.compress(chunk.encode(), 1) for chunk in split_rows(rows)]
        return Encoded(query or "", packed, digest_texts(rows))

    def _encode(self, row: Mapping[str, Any]) -> str:
        key = key_text(row["key"], "key")
        data = row["data"]
        log = self._logs.get(self._channel or row[CHANNEL])
        if log is None:
            raise InvalidRecord(CHANNEL, "is not the name of a registered log")
        fields = [
            json.dumps(log.name),
            str(log.shard_for(key)),
            json.dumps(key),
            *(json.dumps(label_text(row[name], name)) for name in ("action", "object")),
            _json(data, "data", log.max_bytes)
            if isinstance(data, str)
            else json_text(data, "data", log.max_bytes),
        ]
        if row.get(HEADERS) is not None:
            fields.append(headers_text(_parse(row[HEADERS], HEADERS), HEADERS) or "null")
        return f"[{','.join(fields)}]"

    def _insert(self, messages: list[Any], batch: int | None) -> None:
        encoded = [
            message
            for message in messages
            if isinstance(message, Encoded) and (message.rows or batch is not None)
        ]
        if not encoded:
            return
        statement = insert_sql(self._scope.schema, "%s").encode()
        with (
            connect_postgres(
                self._url, application="spark stage", kind=TableConnection
            ) as connection,
            postgres_errors("staging records"),
        ):
            if batch is not None:
                create_table(connection, self._table)
            with connection.transaction():
                if batch is not None and not claim(
                    connection, self._table, self._due(encoded, batch)
                ):
                    return
                for rows in (rows for message in encoded for rows in message.rows):
                    _execute(connection, statement, zlib.decompress(rows).decode())

    def _due(self, encoded: Sequence[Encoded], batch: int) -> DueBatch:
        content = combine((message.digest for message in encoded), self._checkpoint, batch)
        return DueBatch("staged", self._name, encoded[0].query, batch, content)

    def _find_logs(self, max_bytes: int | None) -> dict[str, LogChannel]:
        """Returns the registered logs that rows may be staged for."""
        with connect_postgres(self._url, application="spark stage") as connection:
            registered = registered_channels(Store(connection, self._scope))
        logs = {
            name: LogChannel(name, shards=channel.shards, max_bytes=max_bytes or MAX_PAYLOAD_BYTES)
            for name, channel in registered.items()
            if channel.traits.keeps_records and self._channel in (None, name)
        }
        if self._channel is not None and not logs:
            raise Unknown(
                f"{SOURCE}: no log {self._channel!r} is registered in schema {self._scope.schema}; "
                "a streamer registers it when it starts"
            )
        return logs


class BatchStager(_Stager, DataSourceArrowWriter):
    """Stages the rows of a batch, in one transaction at its end."""

    @one_line_errors()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Inserts the rows of all tasks."""
        self._insert(messages, None)


class StreamStager(_Stager, DataSourceStreamArrowWriter):
    """Stages the rows of a micro-batch, once."""

    def __init__(
        self, raw_options: Mapping[str, Any], schema: StructType, *, overwrite: bool
    ) -> None:
        super().__init__(raw_options, schema, overwrite=overwrite)
        if not self._name:
            raise InvalidSetting(
                f"{SOURCE}: option name is missing: a stream for several logs needs it"
            )

    @one_line_errors()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Inserts the rows of all tasks, unless an earlier attempt at the micro-batch did."""
        self._insert(messages, batchId)


def _channel(options: GivenOptions, schema: StructType) -> str | None:
    """Returns the log of all rows; None if each row names its log in the column ``channel``."""
    if CHANNEL in options:
        return checked_channel(options[CHANNEL])
    if CHANNEL not in schema.names:
        raise InvalidSetting(
            f"{SOURCE}: option channel is missing: the log to stage for; or give the rows a column "
            "channel"
        )
    return None


def check_columns(schema: StructType) -> None:
    """Refuses a DataFrame that lacks a column of a new record, or has one of an unstaged type."""
    missing = [name for name in REQUIRED if name not in schema.names]
    if missing:
        raise InvalidSetting(
            f"{SOURCE}: the DataFrame has no column {missing[0]!r}; to be staged it needs "
            f"{', '.join(REQUIRED)}, and may have "
            f"{HEADERS}"
        )
    _refuse_twice(
        "the DataFrame", [name for name in schema.names if name in {*REQUIRED, HEADERS, CHANNEL}]
    )
    if not isinstance(schema["data"].dataType, StringType | StructType):
        raise InvalidSetting(
            f"{SOURCE}: column 'data' is {schema['data'].dataType.simpleString()}; it takes JSON "
            "text (to_json) or a struct"
        )
    _refuse_types(schema["data"].dataType, "data")
    if HEADERS in schema.names and not isinstance(schema[HEADERS].dataType, StringType):
        raise InvalidSetting(f"{SOURCE}: column {HEADERS!r} takes JSON text (to_json)")


def _refuse_types(kind: DataType, path: str) -> None:
    """Refuses a type whose values ``stage`` does not take.

    An interval would be staged as a list of three numbers.
    """
    match kind:
        case StructType():
            _refuse_twice(f"column {path!r}", kind.names)
            for field in kind.fields:
                _refuse_types(field.dataType, f"{path}.{field.name}")
        case ArrayType():
            _refuse_types(kind.elementType, f"{path}[]")
        case MapType(keyType=StringType()):
            _refuse_types(kind.valueType, f"{path}[]")
        case UserDefinedType():
            _refuse_types(kind.sqlType(), path)
        case _:
            if not isinstance(kind, STAGED):
                raise InvalidSetting(
                    f"{SOURCE}: column {path!r} is {kind.simpleString()}, which JSON does not "
                    "have: cast it to a type that it has, "
                    "such as string (a map needs keys of type string)"
                )


def _refuse_twice(owner: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InvalidSetting(f"{SOURCE}: {owner} has {name!r} twice")


def read_rows(part: pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows as Python values.

    A map is a dict, as applications stage it, not a list of pairs.
    """
    if (rows := _try_read(part)) is not None:
        return rows
    field = next((path for path, values in _columns(part) if _try_read(values) is None), "data")
    raise InvalidRecord(
        field,
        "holds a map that has a key twice, a time with nanoseconds, or a year before 1 or after "
        "9999",
    )


def _columns(part: pa.RecordBatch) -> Iterator[tuple[str, pa.Array]]:
    """Yields the columns, and the fields of structs, by their paths."""
    for name, values in zip(part.schema.names, part.columns, strict=True):
        if pa.types.is_struct(values.type):
            fields = zip(values.type, values.flatten(), strict=True)
            yield from ((f"{name}.{field.name}", field_values) for field, field_values in fields)
        yield name, values


def _try_read(values: pa.RecordBatch | pa.Array) -> list[Any] | None:
    with suppress(
        KeyError, ValueError, OverflowError
    ):  # the error, which holds the key, becomes nobody's context
        read: list[Any] = values.to_pylist(maps_as_pydicts="strict")
        return read
    return None


def _json(text: str, field: str, max_bytes: int) -> str:
    """Returns JSON text as it is: numbers keep all their digits.

    Raises an error if Postgres cannot store it.
    """
    json_text(_parse(text, field), field, max_bytes)
    return text


def _parse(text: str, field: str) -> Any:
    with suppress(ValueError):  # the error, which holds the text, becomes nobody's context
        return parse_json(text)
    raise InvalidRecord(field, "is not valid JSON; use to_json")


def _execute(connection: Connection, statement: bytes, rows: str) -> None:
    """Executes the INSERT; an error holds no payload."""
    try:
        connection.execute(statement, (rows,))
    except psycopg.Error as error:
        failure = make_refusal(error) or error
    else:
        return
    raise failure
