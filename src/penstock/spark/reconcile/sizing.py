"""How many partitions a comparison is shuffled into: by the size of what it reads, and by the slots of the cluster.

A partition is sorted in the memory of one task, and what does not fit goes to files: smaller partitions need fewer of them.
Spark's adaptive execution merges partitions that turn out small, so that an estimate that is too high costs little; it never
divides those of a full join.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

from penstock.spark.jobs import Slots
from penstock.spark.session import SETTINGS

PARTITION_BYTES = 32 * 1024 * 1024
"""Size of a partition, in bytes: in Postgres, or compressed in Spark's files.  In memory it takes two to four times as much."""

COLLECTED_BYTES = 8 * 1024 * 1024
"""Size of a partition whose rows go to the driver, in bytes, in Postgres: as JSON they take several times as much."""

MOST = 20_000
"""Most partitions: Spark's driver keeps something for every pair of a task that writes and one that reads."""

SHUFFLE = "spark.sql.shuffle.partitions"
INITIAL = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"
ADVISORY = "spark.sql.adaptive.advisoryPartitionSizeInBytes"
MERGED_IF_KEPT = "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning"
"""Whether adaptive execution merges the last partitions of a frame that is persisted, too."""


class Partitions:
    """Chooses the number of partitions on a session, unless its user has."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._is_given = spark.conf.get(SHUFFLE, None) != SETTINGS[SHUFFLE] or spark.conf.get(INITIAL, None) is not None

    @contextmanager
    def for_bytes(self, size: int) -> Iterator[None]:
        """What is planned in this block is shuffled into partitions for so many bytes."""
        if self._is_given:
            yield
            return
        count = choose_partitions(size, Slots(self._spark).count())
        chosen = {INITIAL: str(count), ADVISORY: str(PARTITION_BYTES), MERGED_IF_KEPT: "true"}
        settings = {n: v for n, v in chosen.items() if self._spark.conf.get(n, None) is None}
        for name, value in settings.items():
            self._spark.conf.set(name, value)
        try:
            yield
        finally:
            for name in settings:
                self._spark.conf.unset(name)


def kept_partitions(conf: Mapping[str, str]) -> dict[str, str]:
    """A user's settings, in a form in which the number of partitions, if it is among them, is that of comparisons, too."""
    return {INITIAL: conf[SHUFFLE], **conf} if SHUFFLE in conf else dict(conf)


def choose_partitions(size: int, slots: int, each: int = PARTITION_BYTES) -> int:
    """The number of partitions for so many bytes, each of so many, in whole rounds of the slots."""
    slots = max(1, slots)
    wanted = min(MOST, -(-size // each))
    return max(1, -(-wanted // slots)) * slots
