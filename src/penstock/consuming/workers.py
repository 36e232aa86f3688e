"""Which worker a consumer needs: for the records of a log, the members of an Ick, or the jobs of a queue."""

from typing import Any, Unpack

from penstock.consuming.ick.ick_worker import IckWorker
from penstock.consuming.log.log_worker import LogWorker
from penstock.consuming.queue import QueueWorker
from penstock.consuming.several import SourcesWorker
from penstock.consuming.worker import Worker, WorkerOptions
from penstock.database.connections import Database
from penstock.declaring.declarations import ConsumerSpec, Ick, Log, Queue
from penstock.pipeline import Pipeline


def make_worker(
    pipeline: Pipeline, consumer: ConsumerSpec, database: Database, redis_url: str, **options: Unpack[WorkerOptions]
) -> Worker[Any]:
    """The worker for a consumer; see ``Worker`` for the arguments.

    Raises:
        DeclarationError: The consumer is set-based, and needs the Spark engine.
        InvalidSetting: It reads several sources, and the URL of one is not among the option ``sources``.
    """
    if consumer.channel.sources:
        return SourcesWorker(pipeline, consumer, database, redis_url, **options)
    kinds: dict[type, type[Worker[Any]]] = {Log: LogWorker, Ick: IckWorker, Queue: QueueWorker}
    return kinds[type(consumer.channel)](pipeline, consumer, database, redis_url, **options)
