"""The story of a record, and why it is not further than one expects.

report     a story, and an explanation, as values
reading    reads the story from Postgres and Redis
causes     the first cause that holds: pure
finding    by id, place or key
"""

from penstock.operating.tracing.finding import MOST_OF_KEY, explain, trace
from penstock.operating.tracing.report import Explanation, OpenWriter, Reader, Story

__all__ = ["MOST_OF_KEY", "Explanation", "OpenWriter", "Reader", "Story", "explain", "trace"]
