"""The places that hold the records of channels."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import pyarrow as pa

from penstock.errors import PenstockError
from penstock.records import Offset, OffsetRange, ShardName
from penstock.spark.daemon import end_quietly
from penstock.spark.sources.options import Options
from penstock.spark.sources.ranges import Positions

# Every worker of Spark's own daemons that looks up, makes or plans a source imports this module.  Spark closes its connection
# after an idle minute, long before a large table has been read.
end_quietly()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Makes PySpark show an error of Penstock without its traceback; also a decorator."""
    try:
        yield
    except PenstockError:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


class RecordStore(Protocol):
    """A place that holds the records of channels; picklable, connects on first use."""

    @property
    def options(self) -> Options:
        """Of the query."""

    def available(self) -> dict[ShardName, OffsetRange]:
        """The offsets that it has of every shard; ``last`` is the last offset ever assigned, even if it holds no record."""

    def assigned(self) -> dict[ShardName, Offset]:
        """The last offset of every shard that was ever assigned anywhere: the store may be empty, and be filled again."""

    def sequenced_since(self, times: Mapping[ShardName, int]) -> dict[ShardName, Offset | None]:
        """Offsets before which no record was staged at a time or later, None if none was, for the shards of which it knows."""

    def wait(self, positions: Positions, seconds: float) -> None:
        """Returns when there may be a record after one of the positions, or after ``seconds``."""

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """The records of a range, in order."""

    def grow(self, positions: Positions) -> bool:
        """Takes over shards that a channel has got since, once the positions are at the ends of all others; whether there are any."""
