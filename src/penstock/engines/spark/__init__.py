"""Spark as the engine: the same steps in long tasks, and data sources for DataFrame work.

``register(spark)`` makes the data sources known to a session of your own.
"""

from penstock.engines.spark.sources import register

__all__ = ["register"]
