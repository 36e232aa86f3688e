"""Which worker a consumer needs: one for the records of a log, another for the members of an Ick."""

from collections.abc import Collection

from penstock.consuming.dirty import MemberWorker
from penstock.consuming.loop import Worker
from penstock.consuming.worker import BLOCK_MS, ConsumerWorker
from penstock.declarations import ConsumerSpec, Ick
from penstock.pipeline import Pipeline


def worker_of(  # noqa: PLR0913  what can be chosen of a worker
    pipeline: Pipeline,
    consumer: ConsumerSpec,
    database_url: str,
    redis_url: str,
    *,
    shards: Collection[int] | None = None,
    prepare: bool = True,
    block_ms: int = BLOCK_MS,
    reread_chance: float = 0.0,
) -> Worker:
    """The worker for a consumer; see ``ConsumerWorker`` for the arguments.

    Raises:
        DeclarationError: The consumer is set-based, and needs the Spark engine.
    """
    kind = MemberWorker if isinstance(consumer.channel, Ick) else ConsumerWorker
    return kind(
        pipeline,
        consumer,
        database_url,
        redis_url,
        shards=shards,
        prepare=prepare,
        block_ms=block_ms,
        reread_chance=reread_chance,
    )
