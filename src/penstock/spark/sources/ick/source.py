"""``penstock.ick``: an Ick as a source and as a sink."""

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from penstock.spark.sources.ick.columns import SPARK_SCHEMA
from penstock.spark.sources.ick.options import SOURCE, IckOptions
from penstock.spark.sources.ick.reading import IckBatchReader, IckStreamReader
from penstock.spark.sources.ick.writing import IckBatchWriter, IckStreamWriter
from penstock.spark.sources.options import keep_options, with_kept_options
from penstock.spark.sources.store import one_line_errors


class IckSource(DataSource):
    """``penstock.ick``: reads, reserves and marks dirty members."""

    @classmethod
    def name(cls) -> str:
        """Its name for ``format``."""
        return SOURCE

    @one_line_errors()
    def schema(self) -> StructType:
        """The columns of a member."""
        return keep_options(SOURCE, SPARK_SCHEMA, self.options)

    @one_line_errors()
    def reader(self, schema: StructType) -> DataSourceReader:
        """The batch reader, which reserves nothing."""
        return IckBatchReader(IckOptions.parse(with_kept_options(schema, self.options)))

    @one_line_errors()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's
        """The streaming reader, which reserves."""
        return IckStreamReader(IckOptions.parse(with_kept_options(schema, self.options)))

    @one_line_errors()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: FBT001  Spark's
        """The batch writer."""
        return IckBatchWriter(IckOptions.parse(self.options), schema, overwrite=overwrite)

    @one_line_errors()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: FBT001, N802  Spark's
        """The streaming writer."""
        return IckStreamWriter(IckOptions.parse(self.options), schema, overwrite=overwrite)
