"""Makes the worker that a consumer needs, or several, one for each of its sources."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from typing_extensions import override

from penstock.consuming.delivery import Consumed
from penstock.consuming.handler import BLOCK_MS, WorkerSetup
from penstock.consuming.ick_worker import IckWorker
from penstock.consuming.log.log_worker import LogWorker
from penstock.consuming.queue.queue_worker import QueueWorker
from penstock.consuming.several.source_journal import SourceJournal
from penstock.consuming.worker import Worker
from penstock.database.connections import Database
from penstock.database.transactions import Timeouts
from penstock.declaring.declarations import ConsumerSpec
from penstock.declaring.kinds import Ick, LogChannel, Queue
from penstock.errors import DeclarationError, InvalidSetting
from penstock.parallel import Runner, run_together
from penstock.pipeline import Pipeline


class SeveralRunners(Runner[Consumed]):
    """The workers of one consumer, by the names of their threads.

    They share nothing but the handler.
    """

    def __init__(self, consumer: ConsumerSpec, runners: Mapping[str, Worker]) -> None:
        self.consumer, self.runners = consumer, runners

    @override
    def open(self) -> None:
        for runner in self.runners.values():
            runner.open()

    @override
    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()

    def round(self, block_ms: int | None = None) -> Consumed:  # noqa: ARG002  as of one worker
        """Runs a round of each, one after the other, that does not wait."""
        consumed = Consumed()
        for runner in self.runners.values():
            consumed.merge(runner.round(block_ms=0))
        return consumed

    @override
    def drain(self, report: Callable[[Consumed], None] = lambda _: None) -> int:
        return sum(runner.drain(report) for runner in self.runners.values())

    @override
    def run(
        self, stop: Callable[[], bool], report: Callable[[Consumed], None] = lambda _: None
    ) -> None:
        """Runs each in a thread.

        The handler is called for several sources at the same time, as by several processes.
        """
        run_together({name: runner.loop(report) for name, runner in self.runners.items()}, stop)


def make_worker(  # noqa: PLR0913  the choices of a worker
    pipeline: Pipeline,
    consumer: ConsumerSpec,
    database: Database,
    redis_url: str,
    *,
    shards: Collection[int] | None = None,
    prepare: bool = True,
    block_ms: int = BLOCK_MS,
    concurrency: int | None = None,
    sources: Mapping[str, str] | None = None,
    timeouts: Timeouts | None = None,
) -> Worker | SeveralRunners:
    """Returns the worker of a consumer; see ``WorkerSetup`` for the arguments."""
    options = shards, prepare, block_ms, concurrency, sources or {}, timeouts
    setup = WorkerSetup(pipeline, consumer, database, redis_url, *options)
    match consumer.channel:
        case LogChannel(sources=[_, *_]):
            return _make_each(setup, consumer.channel)
        case Ick():
            return IckWorker(setup)
        case Queue():
            return QueueWorker(setup)
        case _:
            return LogWorker(setup)


def _make_each(setup: WorkerSetup, log: LogChannel) -> SeveralRunners:
    consumer, urls = setup.consumer, setup.sources
    if setup.shards is not None:
        raise DeclarationError(
            f"consumer {consumer.name} reads several sources, each with shards of its own: leave "
            "out the shards, and it reads all"
        )
    check_sources(consumer, urls)
    setups = {
        source: setup.of(replace(consumer, channel=log.of_source(source))) for source in log.sources
    }
    workers = {
        source: LogWorker(setups[source], SourceJournal(setups[source], urls[source]))
        for source in setups
    }
    return SeveralRunners(
        consumer, {f"{consumer.name}@{source}": worker for source, worker in workers.items()}
    )


def check_sources(consumer: ConsumerSpec, urls: Mapping[str, str]) -> None:
    """Raises ``InvalidSetting`` if the URL of a source's Postgres is missing."""
    if missing := [source for source in consumer.channel.sources if source not in urls]:
        raise InvalidSetting(
            f"consumer {consumer.name} reads source {missing[0]}, whose Postgres is not known: "
            f"set PENSTOCK_SOURCES__{missing[0].upper()} to its URL"
        )
