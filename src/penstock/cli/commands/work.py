"""``penstock work``: the workers of queues, in this process."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from penstock import inline
from penstock.cli.command import Json, command, require_pipeline, spared_from_garbage_collection
from penstock.cli.commands.consume import raise_if_halted
from penstock.cli.progress import ProgressLine
from penstock.cli.render import say, show_json
from penstock.cli.servers import Servers, servers
from penstock.cli.signals import Stop
from penstock.consuming import Consumed, make_worker
from penstock.declarations import WorkerSpec
from penstock.errors import DeclarationError
from penstock.pipeline import Pipeline
from penstock.settings import Settings
from penstock.streaming import RoundResult


@dataclass
class _Total:
    """What the workers have done.

    Attributes:
        applied: Jobs whose effects are committed.
        cancelled: Jobs that were finished without an effect.
        repeated: Jobs whose effects had happened before.
        dead: Jobs that were dead-lettered.
        snoozed: Times that a handler put a job off.
        retried: Attempts that failed, and are followed by another one.
        stale: Attempts that lost their lease: nothing of them was committed.
    """

    applied: int = 0
    cancelled: int = 0
    repeated: int = 0
    dead: int = 0
    snoozed: int = 0
    retried: int = 0
    stale: int = 0

    def add(self, done: Consumed) -> None:
        """Adds a round."""
        self.applied += done.applied
        self.cancelled += done.cancelled
        self.repeated += done.skipped
        self.dead += done.dead
        self.snoozed += done.snoozed
        self.retried += done.retried
        self.stale += done.stale


@command("concurrency")
def work(
    settings: Settings,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names of the workers; by default all."),
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="Exit when the queues are empty; jobs due later stay.")
    ] = False,
    json: Json = False,
) -> None:
    """Do the jobs of queues; several processes share them. SIGTERM gives back at once what was not begun."""
    stop = Stop()
    pipeline = require_pipeline(settings)
    workers = _find_workers(pipeline, names or [])
    total = _Total()
    with (
        servers(settings, schema=pipeline.scope.schema) as urls,
        ProgressLine("done") as progress,
        spared_from_garbage_collection(),
    ):

        def report(done: RoundResult | Consumed) -> None:
            assert isinstance(done, Consumed)
            total.add(done)
            progress.add(done.applied + done.cancelled)

            if drain and stop():
                raise typer.Exit(0)

        if drain:
            for worker in workers:
                _drain(settings, pipeline, urls, worker, report)
        else:
            inline.run(
                pipeline,
                urls.database_url,
                urls.redis_url,
                consumers=[worker.name for worker in workers],
                streamer=False,
                stop=stop,
                prepare=settings.prepare,
                concurrency=settings.concurrency,
                report=lambda _who, done: report(done),
            )
    if json:
        show_json(asdict(total))
    say(f"{progress.count:,} jobs done")


def _find_workers(pipeline: Pipeline, names: list[str]) -> list[WorkerSpec]:
    """The workers of these names; all, if there are none.

    Raises:
        DeclarationError: A consumer reads something else, or the pipeline has no worker.
    """
    chosen = [pipeline.get_consumer(name) for name in names] or [
        spec for spec in pipeline.consumers.values() if isinstance(spec, WorkerSpec)
    ]
    others = [spec.name for spec in chosen if not isinstance(spec, WorkerSpec)]
    if others:
        raise DeclarationError(
            f"{others[0]} is the consumer of a {pipeline.get_consumer(others[0]).channel.kind}, not the worker of a queue: "
            f"penstock consume {others[0]}"
        )
    if not chosen:
        raise DeclarationError(
            "the pipeline declares no worker of a queue: @pipeline.worker(reads=…)"
        )
    return [spec for spec in chosen if isinstance(spec, WorkerSpec)]


def _drain(
    settings: Settings,
    pipeline: Pipeline,
    urls: Servers,
    spec: WorkerSpec,
    report: Callable[[Consumed], None],
) -> None:
    worker = make_worker(
        pipeline,
        spec,
        urls.database_url,
        urls.redis_url,
        prepare=settings.prepare,
        concurrency=settings.concurrency,
    )
    try:
        worker.drain(report)
    finally:
        worker.close()
    raise_if_halted(settings, pipeline, urls, spec.name)
