"""The worker of a consumer that reads several sources: one for each, which share nothing but the handler."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Unpack

from typing_extensions import override

from penstock.consuming.delivered import Consumed
from penstock.consuming.several.worker import SourceWorker
from penstock.consuming.worker import Worker, WorkerOptions
from penstock.database.connections import Database
from penstock.declaring.declarations import ConsumerSpec, Log
from penstock.errors import DeclarationError, InvalidSetting
from penstock.parallel import run_together
from penstock.pipeline import Pipeline
from penstock.records import Record


def check_sources(consumer: ConsumerSpec, urls: Mapping[str, str]) -> None:
    """Makes sure that the Postgres of each source of a consumer is known.

    Raises:
        InvalidSetting: The URL of one is missing.
    """
    if missing := [source for source in consumer.channel.sources if source not in urls]:
        raise InvalidSetting(
            f"consumer {consumer.name} reads source {missing[0]}, whose Postgres is not known: "
            f"set PENSTOCK_SOURCES__{missing[0].upper()} to its URL"
        )


class SourcesWorker(Worker[Record]):
    """Runs a consumer over all sources of its log; ``run`` gives each a thread, so that none waits for another."""

    def __init__(
        self,
        pipeline: Pipeline,
        consumer: ConsumerSpec,
        database: Database,
        redis_url: str,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """Sets up; ``open`` connects.

        Raises:
            DeclarationError: The log has no sources, or some of its shards are chosen.
            InvalidSetting: The URL of a source is missing.
        """
        super().__init__(pipeline, consumer, database, redis_url, **options)
        channel = consumer.channel
        if not isinstance(channel, Log) or not channel.sources:
            raise DeclarationError(f"consumer {consumer.name} reads no log of several sources")
        if options.get("shards") is not None:
            raise DeclarationError(
                f"consumer {consumer.name} reads several sources, each with its own shards: it takes all of them"
            )
        urls = options.get("sources", {})
        check_sources(consumer, urls)
        self._workers = {
            source: SourceWorker(
                pipeline,
                replace(consumer, channel=channel.of_source(source)),
                database,
                redis_url,
                source_url=urls[source],
                **options,
            )
            for source in channel.sources
        }

    @override
    def open(self) -> None:
        """Opens each; see ``Worker.open``."""
        for worker in self._workers.values():
            worker.open()

    @override
    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    @override
    def round(self, block_ms: int | None = None) -> Consumed:
        """A round of each, one after the other, that does not wait."""
        consumed = Consumed()
        for worker in self._workers.values():
            consumed.merge(worker.round(block_ms=0))
        return consumed

    @override
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        """Drains one after the other; gives the number of records applied."""
        return sum(worker.drain(report) for worker in self._workers.values())

    @override
    def run(self, stop: Callable[[], bool], report: Callable[[Consumed], None] = lambda _: None) -> None:
        """Runs all until ``stop()`` is true; see ``Worker.run``.

        The handler is called for several sources at the same time, as it is by several processes.
        """
        name = self.consumer.name
        loops = {f"{name}@{s}": _make_loop(w, report) for s, w in self._workers.items()}
        run_together(loops, stop)


def _make_loop(worker: SourceWorker, report: Callable[[Consumed], None]) -> Callable[[Callable[[], bool]], None]:
    return lambda stop: worker.run(stop, report)
