"""Typed payloads: JSON text, parsed by Arrow into the fields that a query names."""

import io

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from penstock.errors import InvalidSetting, UnreadableValue

_READABLE = (
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    StringType,
    TimestampNTZType,
    TimestampType,
)


def check_readable(source: str, name: str, type_: DataType) -> None:
    """Checks that a type can be read from JSON.

    Raises:
        InvalidSetting: It cannot, or a field is NOT NULL: a payload may lack it.
    """
    if isinstance(type_, ArrayType):
        check_readable(source, f"{name}[]", type_.elementType)
    elif isinstance(type_, StructType):
        for field in type_:
            if not field.nullable:
                raise InvalidSetting(
                    f"{source}: {name}.{field.name} is NOT NULL, but a payload may lack it"
                )
            check_readable(source, f"{name}.{field.name}", field.dataType)
    elif not isinstance(type_, _READABLE):
        raise InvalidSetting(
            f"{source}: {name} cannot be read as {type_.simpleString()}; read data as string, and use from_json"
        )


def parse_payloads(batch: pa.RecordBatch, wanted: pa.StructType) -> pa.StructArray:
    """The payloads of a batch of records.  A missing field is null, one that is not named is left out.

    Raises:
        UnreadableValue: A payload is no JSON object, or a field has another type; the error names the record.
    """
    texts = batch.column("data")
    parsed = _try_parse(texts, wanted)
    if parsed is not None:
        return parsed
    for number in range(batch.num_rows):
        if _try_parse(texts.slice(number, 1), wanted) is None:
            record = batch.slice(number, 1).to_pylist()[0]
            raise UnreadableValue(
                f"{record['channel']}/{record['shard']} offset {record['offset']}: the payload does not fit the schema "
                f"of data, {wanted}. Widen the schema, or read data as string"
            )
    raise UnreadableValue("the payloads of a batch do not fit the schema of data")


def _try_parse(texts: pa.StringArray, wanted: pa.StructType) -> pa.StructArray | None:
    """None if a payload does not fit.  Arrow's error is dropped, because it may quote the payload."""
    # Arrow's parser crashes on a null, so only objects reach it.
    if not texts or not pc.all(pc.starts_with(texts, pattern="{")).as_py():
        return None if texts else pa.array([], wanted)
    joined = "\n".join(texts.to_pylist()).encode()
    try:
        table = pj.read_json(
            io.BytesIO(joined),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(joined) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([_written(field) for field in wanted]),
                unexpected_field_behavior="ignore",
            ),
        )
        if table.num_rows != len(texts):
            return None
        columns = [
            table.column(number).combine_chunks().cast(wanted.field(number).type)
            for number in range(wanted.num_fields)
        ]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return pa.StructArray.from_arrays(columns, fields=list(wanted))


def _written(field: pa.Field) -> pa.Field:
    """The field as Arrow's parser reads it: it knows no dates, which are text until they are cast."""
    return field.with_type(_written_type(field.type))


def _written_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_date(type_):
        return pa.string()
    if pa.types.is_list(type_):
        return pa.list_(_written(type_.value_field))
    if pa.types.is_struct(type_):
        return pa.struct([_written(field) for field in type_])
    return type_
