"""``penstock work``: the workers of queues, in this process."""

from collections import Counter
from collections.abc import Callable
from typing import Annotated

import typer

from penstock.cli.command import Json, command, require_pipeline, spared_from_garbage_collection
from penstock.cli.loops import ProgressLine, Stop, raise_if_halted
from penstock.cli.render import say, show_json
from penstock.cli.servers import Servers, servers
from penstock.consuming import Consumed, make_worker
from penstock.declaring.declarations import WorkerSpec
from penstock.engines import inline
from penstock.errors import DeclarationError
from penstock.pipeline import Pipeline
from penstock.settings import Settings
from penstock.streaming import RoundResult


def _count(done: Consumed) -> Counter[str]:
    """What ``--json`` counts: see ``Consumed``.  ``repeated``: the effect had happened before."""
    return Counter(
        applied=done.applied,
        cancelled=done.cancelled,
        repeated=done.skipped,
        dead=done.dead,
        snoozed=done.snoozed,
        retried=done.retried,
        stale=done.stale,
    )


@command("concurrency")
def work(
    settings: Settings,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Names of the workers; by default all.")
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
    total = _count(Consumed())
    with (
        servers(settings, schema=pipeline.scope.schema) as urls,
        ProgressLine("done") as progress,
        spared_from_garbage_collection(),
    ):

        def report(done: RoundResult | Consumed) -> None:
            assert isinstance(done, Consumed)
            total.update(_count(done))
            progress.add(done)
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
        show_json(total)
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
        raise DeclarationError("the pipeline declares no worker of a queue: @pipeline.worker(reads=…)")
    return [spec for spec in chosen if isinstance(spec, WorkerSpec)]


def _drain(
    settings: Settings, pipeline: Pipeline, urls: Servers, spec: WorkerSpec, report: Callable[[Consumed], None]
) -> None:
    worker = make_worker(
        pipeline, spec, urls.database_url, urls.redis_url, prepare=settings.prepare, concurrency=settings.concurrency
    )
    try:
        worker.drain(report)
    finally:
        worker.close()
    raise_if_halted(settings, pipeline, spec.name)
