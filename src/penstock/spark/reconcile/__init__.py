"""Reconciling on Spark: canonical rows in one snapshot, a consumer's state in another, every key of either.

tables       what a canonical function is given
differences  two frames, key by key
rows         rows as JSON that Postgres takes for rows
comparer     all of it, for ``penstock.reconciling``
"""

from penstock.spark.reconcile.comparer import SparkComparer
from penstock.spark.reconcile.tables import Tables, told_by_tasks

__all__ = ["SparkComparer", "Tables", "told_by_tasks"]
