"""Which worker a consumer needs: one for the records of a log, another for the members of an Ick."""

from typing import Any, Unpack

from penstock.consuming.ick_worker import IckWorker
from penstock.consuming.log_worker import LogWorker
from penstock.consuming.worker import Worker, WorkerOptions
from penstock.database.connections import Database
from penstock.declarations import ConsumerSpec, Ick
from penstock.pipeline import Pipeline


def make_worker(
    pipeline: Pipeline,
    consumer: ConsumerSpec,
    database: Database,
    redis_url: str,
    **options: Unpack[WorkerOptions],
) -> Worker[Any]:
    """The worker for a consumer; see ``Worker`` for the arguments.

    Raises:
        DeclarationError: The consumer is set-based, and needs the Spark engine.
    """
    kind = IckWorker if isinstance(consumer.channel, Ick) else LogWorker
    return kind(pipeline, consumer, database, redis_url, **options)
