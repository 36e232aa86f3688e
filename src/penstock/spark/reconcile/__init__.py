"""Reconciliation and verification on Spark.

tables       the tables that a canonical function reads
exact        columns in a form in which equal values are equal, on both sides
differences  compares two frames, key by key
rows         rows as JSON that Postgres can read as rows
comparer     compares canonical rows in one snapshot with a consumer's state in another, for ``penstock.reconciling``
verify       compares the log with Postgres, for ``penstock.verifying``
"""

from penstock.spark.reconcile.comparer import SparkComparer
from penstock.spark.reconcile.tables import Tables, task_errors

__all__ = ["SparkComparer", "Tables", "task_errors"]
