"""Reconciliation and verification on Spark.

spark_comparer  compares canonical rows with a consumer's state, for ``penstock.reconciling``
exact_join      compares two frames, key by key, in a form in which equal values are equal
log_examiner    compares the log with Postgres, for ``penstock.verifying``
"""
