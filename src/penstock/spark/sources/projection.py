"""The columns that a query reads, and the types of its payloads: the schema that the reader was given.

    spark.read.format("penstock.log").schema("key string, timestamp timestamp, data struct<fare: decimal(10, 2)>")

Spark does not tell a Python data source which columns a query needs, so the schema says it.
"""

from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import InvalidSetting
from penstock.spark.sources.columns import HEADERS, SPARK_SCHEMA
from penstock.spark.sources.payloads import check_readable, parse_payloads

_DATA = "data"


@dataclass(frozen=True)
class Projection:
    """What a row has of a record.

    Attributes:
        schema: The columns, in Arrow.
    """

    schema: pa.Schema

    @classmethod
    def parse(cls, source: str, wanted: StructType) -> "Projection":
        """The columns that are wanted, in their order.

        Raises:
            InvalidSetting: There is no such column, or it cannot be read in that type.
        """
        for column in wanted:
            if column.name not in SPARK_SCHEMA.names:
                raise InvalidSetting(
                    f"{source}: there is no column {column.name!r}; there are {', '.join(SPARK_SCHEMA.names)}"
                )
            known = SPARK_SCHEMA[column.name]
            if column.name == _DATA and isinstance(column.dataType, StructType):
                check_readable(source, _DATA, column.dataType)
            elif column.dataType != known.dataType:
                raise InvalidSetting(
                    f"{source}: column {column.name!r} cannot be read as {column.dataType.simpleString()}; it is "
                    f"{known.dataType.simpleString()}" + (", or a struct" if column.name == _DATA else "")
                )
        return cls(to_arrow_schema(wanted, timezone="UTC"))

    @property
    def needs_payloads(self) -> bool:
        """Whether it has payloads or headers."""
        return not {_DATA, HEADERS}.isdisjoint(self.schema.names)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of a batch of records.

        Raises:
            UnreadableValue: A payload does not have the type.
        """
        columns = [
            parse_payloads(batch, field.type) if pa.types.is_struct(field.type) else batch.column(field.name)
            for field in self.schema
        ]
        if not columns:  # a query that only counts
            return batch.select([])
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


ALL_COLUMNS = Projection(to_arrow_schema(SPARK_SCHEMA, timezone="UTC"))
