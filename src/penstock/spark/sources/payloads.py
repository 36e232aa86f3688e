"""Typed payloads: JSON text, parsed by Arrow into the fields that a query names."""

import io
import json
import struct
from decimal import Decimal
from typing import Any

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
                raise InvalidSetting(f"{source}: {name}.{field.name} is NOT NULL, but a payload may lack it")
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
                explicit_schema=pa.schema([_written(field) for field in wanted]), unexpected_field_behavior="ignore"
            ),
        )
        if table.num_rows != len(texts) or not _keep_digits(texts, wanted):
            return None
        columns = [
            table.column(number).combine_chunks().cast(wanted.field(number).type) for number in range(wanted.num_fields)
        ]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return pa.StructArray.from_arrays(columns, fields=list(wanted))


_MANY_DIGITS = r"[0-9][0-9.]{6,}|[eE][-+]?[0-9]{2}"
"""What a text has whose numbers may not fit into a float: more digits than six, or a large exponent."""


def _keep_digits(texts: pa.StringArray, wanted: pa.StructType) -> bool:
    """Whether all numbers that are read as floats keep their digits, which Arrow does not look at."""
    if not any(_has_floats(field.type) for field in wanted):
        return True
    doubtful = texts.filter(pc.match_substring_regex(texts, _MANY_DIGITS))
    try:
        payloads = [json.loads(text, parse_float=Decimal, parse_int=Decimal) for text in doubtful.to_pylist()]
    except (ValueError, RecursionError):
        return False
    return all(_keeps_digits(each, wanted) for each in payloads)


def _has_floats(type_: pa.DataType) -> bool:
    if pa.types.is_list(type_) or pa.types.is_struct(type_):
        return any(_has_floats(type_.field(n).type) for n in range(type_.num_fields))
    return bool(pa.types.is_floating(type_))


def _keeps_digits(value: Any, type_: pa.DataType) -> bool:
    if value is None:
        return True
    if pa.types.is_struct(type_):
        return all(_keeps_digits(value.get(field.name), field.type) for field in type_)
    if pa.types.is_list(type_):
        return all(_keeps_digits(each, type_.value_type) for each in value)
    if not pa.types.is_floating(type_):
        return True
    try:
        near = float(value)
        if pa.types.is_float32(type_):
            [near] = struct.unpack("f", struct.pack("f", near))
    except OverflowError:
        return False
    digits = "".join(map(str, value.as_tuple().digits)).strip("0")
    return bool(Decimal(f"{near:.{max(1, len(digits))}g}") == value)


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
