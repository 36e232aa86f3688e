"""The inline engine: one Python process, without Spark and without a JVM.

engine     the streamer and the consumers, a thread each
examiner   compares the log with Postgres, for ``penstock.verifying``
comparer   compares canonical rows with a consumer's state, for ``penstock.reconciling``
sides      reads both of them in the order of their keys, a few thousand rows at a time
values     when two values are equal, and rows as JSON
tables     what a canonical function is given
"""

from penstock.reconciling.inline.comparer import InlineComparer
from penstock.reconciling.inline.tables import Tables, needs_spark

__all__ = ["InlineComparer", "InlineExaminer", "Report", "Tables", "needs_spark", "run"]
