"""Content of a micro-batch: a restored or copied checkpoint directory gives its number out again.

Before Spark runs a micro-batch it writes a file, ``offsets/<number>``, with the time and with where
each source ends.  A micro-batch that is repeated has the same file, even if its rows are computed
anew and differ; one that is planned anew has another.  Where the file cannot be read, the rows are
compared.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

QUERY_ID = "sql.streaming.queryId"
"""Spark's local property with the id that a query keeps in its checkpoint."""

_DIGEST_BYTES = 16
_LOCAL = re.compile(r"^(?:file:(?://)?)?(?=/|[^:]*$)")
_HEADER_LINES = 2
"""Lines of the file before those of the sources: its version, and the time and settings of the
micro-batch."""


@dataclass(frozen=True, slots=True)
class BatchContent:
    """Content of a micro-batch: a digest, and the ends of its sources if they are known.

    ``ends`` has the form of ``startingOffsets``.
    """

    digest: str
    ends: str = ""


def find_content(frame: DataFrame, batch: int) -> BatchContent:
    """Returns the content of a micro-batch in ``foreachBatch``.

    Without the query, as in Spark Connect, it reads the rows once more.
    """
    plan = _read_plan(frame, batch)
    return _digest_rows(frame) if plan is None else BatchContent(_digest(plan), _find_ends(plan))


def local_property(frame: DataFrame, name: str) -> str | None:
    """Returns a property of the thread that runs a micro-batch; None outside of one.

    None also in Spark Connect, which has no context.
    """
    try:
        value = frame.sparkSession.sparkContext.getLocalProperty(name)
    except Exception:  # noqa: BLE001  of whatever kind, by version
        return None
    return None if value is None else str(value)


def _read_plan(frame: DataFrame, batch: int) -> str | None:
    """Returns the file of a micro-batch in the checkpoint directory of this thread's query.

    The directory may be on any file system.
    """
    query = local_property(frame, QUERY_ID)
    if query is None:
        return None
    # PySpark shows neither the checkpoint directory nor its file systems.
    jvm: Any = frame.sparkSession.sparkContext._jvm  # noqa: SLF001
    session = frame._jdf.sparkSession()  # noqa: SLF001
    running = (
        session.sharedState().activeStreamingQueries().get(jvm.java.util.UUID.fromString(query))
    )
    if running is None:
        return None
    path = jvm.org.apache.hadoop.fs.Path(f"{running.resolvedCheckpointRoot()}/offsets/{batch}")
    files = path.getFileSystem(session.sessionState().newHadoopConf())
    if not files.exists(path):
        return None
    stream = files.open(path)
    try:
        return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()


def _digest_rows(frame: DataFrame) -> BatchContent:
    """Returns a digest of the rows, in any order."""
    rows = frame.selectExpr("to_json(struct(*)) AS r")
    sums = (f"sum(CAST(xxhash64({salt}, r) AS DECIMAL(38, 0))) AS s{salt}" for salt in (0, 1))
    return BatchContent(_digest(str(rows.selectExpr("count(1) AS n", *sums).first())))


def combine(digests: Iterable[int], checkpoint: str | None, batch: int) -> BatchContent:
    """Returns the content of a micro-batch from the digests of its tasks' rows, and from the file.

    The file is used if its directory is a local one.
    """
    rows = f"{sum(digests):x}"
    directory = _LOCAL.match(checkpoint or "")
    if checkpoint is None or directory is None:
        return BatchContent(rows)
    try:
        plan = (Path(checkpoint[directory.end() :]) / "offsets" / str(batch)).read_text(
            encoding="utf-8"
        )
    except OSError:  # of another file system, whose paths may have no scheme
        return BatchContent(rows)
    return BatchContent(_digest(rows + plan), _find_ends(plan))


def digest_texts(texts: Iterable[str]) -> int:
    """Returns a digest of the rows of a task, in any order: the sum of the digests."""
    return sum(
        int.from_bytes(blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()) for text in texts
    )


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _find_ends(plan: str) -> str:
    return " ".join(plan.splitlines()[_HEADER_LINES:])
