"""Which worker a consumer needs: one for the records of a log, another for the members of an Ick."""

from typing import Unpack

from penstock.consuming.dirty import MemberWorker
from penstock.consuming.loop import Choices, Worker
from penstock.consuming.worker import ConsumerWorker
from penstock.declarations import ConsumerSpec, Ick
from penstock.pipeline import Pipeline


def make_worker(
    pipeline: Pipeline,
    consumer: ConsumerSpec,
    database_url: str,
    redis_url: str,
    **chosen: Unpack[Choices],
) -> Worker:
    """The worker for a consumer; see ``Worker`` for the arguments.

    Raises:
        DeclarationError: The consumer is set-based, and needs the Spark engine.
    """
    kind = MemberWorker if isinstance(consumer.channel, Ick) else ConsumerWorker
    return kind(pipeline, consumer, database_url, redis_url, **chosen)
