"""The pipeline whose handlers note when their records' effects are committed: ``four`` is for ``--app``.

Spark's tasks import it by its name.  Whoever does hooks it into the worker.
"""

from functools import wraps
from typing import Any

from penstock.bench.application import Handler, pipeline_with
from penstock.bench.watching.arrivals import note
from penstock.crashpoints import install_crashpoint

COMMITTED = ("consumer.after_commit", "together.after_commit")

_waiting: list[int] = []


def _noting(handler: Handler) -> Handler:
    @wraps(handler)
    def handle(session: Any, records: Any) -> None:
        _waiting[:] = [record.data["id"] for record in records]
        handler(session, records)

    return handle


def _passed(point: str) -> None:
    if point in COMMITTED and _waiting:
        note(_waiting)
        _waiting.clear()


four = pipeline_with(4, _noting)
install_crashpoint(_passed)
