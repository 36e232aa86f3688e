"""Setup of a worker: what every kind of worker, and its transactions, need to know."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from penstock.database.connections import Database, get_database_url
from penstock.database.transactions import Timeouts
from penstock.declaring.declarations import ConsumerSpec
from penstock.pipeline import Pipeline
from penstock.records import Scope

BLOCK_MS = 500
"""Longest wait for work, in milliseconds: a stop is noticed within it."""


@dataclass(frozen=True)
class WorkerSetup:
    """One consumer's worker: what it runs, on which servers, and how.

    Attributes:
        pipeline: The consumer's pipeline.
        consumer: Which consumer.
        database: Where its effects and checkpoints are: a URL, or an engine whose URL is taken.
        redis_url: Where its channel is.
        shards: Numbers of the declared shards to work on; None takes all.  Of a generation of more shards than are declared,
            those beyond go with 0, 1, 2 …: workers that together have all numbers work on all shards.
        prepare: Whether statements may be prepared; behind a pooler none are.
        block_ms: Longest wait for work, in milliseconds: a stop is noticed within it.
        concurrency: Of a queue: jobs at the same time; None takes what the worker declares.
        sources: Of a log that is read from several sources: the URL of each source's Postgres, by the source's name.
        timeouts: Those of a caller that cannot wait as long as a worker.
    """

    pipeline: Pipeline
    consumer: ConsumerSpec
    database: Database
    redis_url: str = ""
    shards: Collection[int] | None = None
    prepare: bool = True
    block_ms: int = BLOCK_MS
    concurrency: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    timeouts: Timeouts | None = None

    @property
    def scope(self) -> Scope:
        """Schema and namespace of the pipeline."""
        return self.pipeline.scope

    @property
    def database_url(self) -> str:
        """URL of the consumer's Postgres."""
        return get_database_url(self.database)

    @property
    def application(self) -> str:
        """Name of its connections."""
        return f"consumer {self.consumer.name}"

    def of(self, consumer: ConsumerSpec) -> "WorkerSetup":
        """The same for another consumer."""
        return replace(self, consumer=consumer)
