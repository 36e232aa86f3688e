"""The number of partitions of a comparison on Spark follows the size of the tables and the slots of the cluster."""

import pytest
from pyspark.sql import SparkSession

from penstock.spark.reconcile.spark_comparer import (
    INITIAL,
    MAX_PARTITIONS,
    SHUFFLE,
    choose_partitions,
    kept_partitions,
    partitions_for,
)

GB = 1024**3


@pytest.mark.parametrize(
    ("size", "slots", "partitions"),
    [
        (0, 2, 2),  # a small table: one round
        (1 * GB, 2, 32),
        (1 * GB, 24, 48),  # whole rounds: no slot is idle in the last one
        (1 * GB, 1000, 1000),
        (100_000 * GB, 2, MAX_PARTITIONS),
        (1 * GB, 0, 32),  # no executor has registered yet
    ],
)
def test_partitions_follow_the_size_and_the_slots(size: int, slots: int, partitions: int) -> None:
    assert choose_partitions(size, slots) == partitions


@pytest.mark.parametrize("setting", [SHUFFLE, INITIAL])
def test_a_number_that_the_user_has_set_is_kept(spark: SparkSession, setting: str) -> None:
    """Otherwise there is the session's default again when the comparison has ended."""
    with partitions_for(spark, 1 * GB):
        assert spark.conf.get(INITIAL) == "32"
    assert spark.conf.get(INITIAL, None) is None

    before = spark.conf.get(SHUFFLE) or "2"
    spark.conf.set(setting, "7")
    try:
        with partitions_for(spark, 1 * GB):
            assert spark.conf.get(setting) == "7"
    finally:
        spark.conf.set(SHUFFLE, before)
        spark.conf.unset(INITIAL)


def test_partitions_that_turn_out_small_are_merged(spark: SparkSession) -> None:
    """Also those of a frame that is persisted: an estimate that is too high costs nothing."""
    with partitions_for(spark, 1 * GB):
        kept = spark.range(1000).repartition("id").groupBy("id").count().persist()
        kept.count()
    try:
        assert kept.rdd.getNumPartitions() < 4
    finally:
        kept.unpersist()


def test_a_number_that_equals_the_default_is_kept_as_well() -> None:
    assert kept_partitions({SHUFFLE: "2"}) == {SHUFFLE: "2", INITIAL: "2"}
    assert kept_partitions({SHUFFLE: "2", INITIAL: "9"}) == {SHUFFLE: "2", INITIAL: "9"}
    assert kept_partitions({}) == {}
