"""Pipelines whose handlers note when the effects of their records are committed, imported by name: ``four``, its twin.

Spark's tasks import this module too.  Importing it installs the crash point that notes commits in that process.
"""

from functools import wraps
from typing import Any

from benchmarks.application import ConsumerFunction, make_pipeline, observe
from benchmarks.watching.arrivals import note
from penstock.crash_points import install_crashpoint

COMMITTED = ("consumer.after_commit", "together.after_commit")

_waiting: list[int] = []


def _remember_records(handler: ConsumerFunction) -> ConsumerFunction:
    @wraps(handler)
    def handle(session: Any, records: Any) -> None:
        _waiting[:] = [record.data["id"] for record in records]
        handler(session, records)

    return handle


def _note_commit(point: str) -> None:
    if point in COMMITTED and _waiting:
        note(_waiting)
        _waiting.clear()


four = make_pipeline(4, _remember_records)
four_plain = make_pipeline(4, _remember_records, "plain")
four_observed = observe(make_pipeline(4, _remember_records))
install_crashpoint(_note_commit)
