"""An outbox for Celery: tasks are sent if, and only if, the transaction that wants them commits.

``task.delay()`` before the commit runs for what may be rolled back; after it, is lost if the process ends in between.

penstock run --app celery_outbox:pipeline --engine inline
celery --app celery_outbox worker
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery import Celery  # type: ignore[import-untyped]
from kombu.exceptions import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from penstock import Log, Pipeline, Record, Snooze

app = Celery("shop", broker=os.environ.get("CELERY_BROKER_URL", "redis://127.0.0.1:6379/1"))


@dataclass
class Call:
    """A task and its arguments."""

    task: str
    arguments: dict[str, Any]


calls = Log("celery_calls", payload=Call)
pipeline = Pipeline([calls])
Sessions = sessionmaker()  # the application's, bound to its engine
pipeline.attach(Sessions)


def send_later(session: Session, task: str, *, key: str, **arguments: Any) -> None:
    """Sends a task after the commit; those of one key are sent in the order of their commits."""
    calls.stage(session, Call(task, arguments), key=key)


@pipeline.consumer(reads=calls)
def send_tasks(_session: Session, records: Sequence[Record]) -> None:
    """Sends them, at least once: sent again after a crash, a task has the id that it had.

    The id is the record's place, so ``penstock trace`` finds it.
    """
    try:
        for record in records:
            app.send_task(record.data["task"], kwargs=record.data["arguments"], task_id=str(record.place))
    except OperationalError as error:
        raise Snooze(
            "5s", "the broker does not answer"
        ) from error  # which is no attempt: nothing is dead-lettered for it


@app.task(name="mails.welcome", acks_late=True)  # type: ignore[untyped-decorator]
def welcome(name: str) -> str:
    """A task; it can find in ``welcome.request.id`` whether it has been done before."""
    return f"Welcome, {name}!"
