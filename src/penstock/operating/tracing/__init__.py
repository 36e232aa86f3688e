"""The story of a record, and why it is not further than one expects.

story     a story, and an explanation, as values; read from Postgres and Redis
causes    the first cause that holds
"""

from penstock.operating.tracing.causes import MAX_OF_KEY, explain, trace
from penstock.operating.tracing.story import Diagnosis, OpenWriter, ReaderProgress, Story

__all__ = ["MAX_OF_KEY", "Diagnosis", "OpenWriter", "ReaderProgress", "Story", "explain", "trace"]
