"""``penstock run``, ``stream``, ``consume`` and ``work``: run until stopped, or until empty."""

from collections import Counter
from typing import Annotated, Any

import typer

from penstock.cli.command import (
    Json,
    command,
    require_extra,
    require_pipeline,
    spared_from_garbage_collection,
)
from penstock.cli.connecting import Servers, open_connections, servers
from penstock.cli.engines import choose_engine, open_comparer
from penstock.cli.loops import (
    ProgressLine,
    Stop,
    choose_share,
    observed,
    raise_if_stopped,
    run_loop,
)
from penstock.cli.render import say, show_json
from penstock.consuming import Consumed, make_worker
from penstock.declaring.declarations import WorkerSpec
from penstock.display import format_count
from penstock.engines import inline
from penstock.errors import DeclarationError, InvalidSetting
from penstock.pipeline import Pipeline
from penstock.reconciling.reconciliation import find_reconciliations, has_never_applied, reconcile
from penstock.settings import Settings
from penstock.streaming import RoundResult, Streamer


@command(
    "engine", "master", "conf", "epoch_length", "idle", "share", "concurrency", "sources", "listen"
)
def run(
    settings: Settings,
    consumer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this consumer. The option may be repeated."),
    ] = None,
    streamer: Annotated[
        bool, typer.Option(help="Whether this process also runs the streamer.")
    ] = True,
) -> None:
    """Run the whole pipeline: the streamer and all consumers."""
    stop = Stop()
    pipeline, share = require_pipeline(settings), choose_share(settings)
    names = consumer or list(pipeline.consumers)
    specs = [pipeline.get_consumer(name) for name in names]
    with (
        observed(settings, pipeline) as metrics,
        servers(settings, schema=pipeline.scope.schema) as urls,
        ProgressLine("published and applied") as progress,
    ):
        engine = choose_engine(settings, specs)
        if engine == "spark" and not share.is_whole:
            raise InvalidSetting(
                "Spark divides the shards by itself: leave out the share, or use --engine inline"
            )
        work: dict[str, Any] = {
            "consumers": names,
            "streamer": streamer,
            "stop": stop,
            "idle_s": settings.idle,
            "prepare": settings.prepare,
            "sources": settings.source_urls,
        }
        if engine == "inline":
            work |= {
                "concurrency": settings.concurrency,
                "share": share,
                "report": lambda _, did: progress.add(did),
            }
            with spared_from_garbage_collection():
                inline.run(pipeline, urls.database_url, urls.redis_url, **work)
        else:
            _run_on_spark(settings, pipeline, urls, work | {"observer": metrics})
    say("stopped")


def _run_on_spark(
    settings: Settings, pipeline: Pipeline, urls: Servers, work: dict[str, Any]
) -> None:
    with require_extra("spark", "the engine spark", ", or use --engine inline"):
        from penstock.engines.spark import application  # noqa: PLC0415  an optional extra
    assert settings.app is not None  # the pipeline was loaded from it
    work |= {
        "master": settings.master,
        "conf": settings.spark_conf,
        "epoch_s": settings.epoch_length,
    }
    application.run(settings.app, pipeline, urls.database_url, urls.redis_url, **work)


@command("idle", "share", "listen")
def stream(
    settings: Settings,
    drain: Annotated[
        bool, typer.Option("--drain", help="Exit when every staged record is published.")
    ] = False,
) -> None:
    """Sequence and publish staged records. Several streamers may run at once."""
    stop = Stop()
    pipeline = require_pipeline(settings)
    share = choose_share(settings)
    if drain and not share.is_whole:
        raise InvalidSetting("--drain publishes everything: leave out the share")
    with (
        observed(settings, pipeline),
        servers(settings, schema=pipeline.scope.schema) as urls,
        ProgressLine("published") as progress,
    ):
        streamer = Streamer(
            pipeline,
            urls.database_url,
            urls.redis_url,
            idle_s=settings.idle,
            prepare=settings.prepare,
            share=share,
        )
        run_loop(streamer, stop, progress.add, drain=drain)
    say(f"{format_count(progress.count, 'record')} published")


@command("engine", "master", "conf", "sources", "listen")
def consume(
    settings: Settings,
    name: str,
    drain: Annotated[bool, typer.Option("--drain")] = False,
    shards: Annotated[str | None, typer.Option(metavar="0,1")] = None,
    begin: Annotated[str | None, typer.Option("--from", metavar="tables")] = None,
) -> None:
    """Apply records with one consumer. Several processes divide its shards among themselves.

    Args:
        name: Name of the consumer.
        drain: Exit when the log has no more records.
        shards: Only these shards.
        begin: Start a new consumer from the canonical tables instead of from old records.
    """
    stop = Stop()
    pipeline = require_pipeline(settings)
    consumer = pipeline.get_consumer(name)
    chosen = None if shards is None else _parse_shards(shards, consumer.channel.shards)
    if begin not in {None, "tables"}:
        raise InvalidSetting(f"--from {begin}: it takes 'tables'")
    with (
        observed(settings, pipeline),
        servers(settings, schema=pipeline.scope.schema) as urls,
        ProgressLine("applied") as progress,
        spared_from_garbage_collection(),
    ):
        if begin is not None:
            _bootstrap(settings, pipeline, name)
        how: dict[str, Any] = {
            "shards": chosen,
            "prepare": settings.prepare,
            "sources": settings.source_urls,
        }
        worker = make_worker(pipeline, consumer, urls.database_url, urls.redis_url, **how)
        run_loop(worker, stop, progress.add, drain=drain)
        if drain:
            raise_if_stopped(settings, pipeline, name)
    say(f"{format_count(progress.count, 'record')} applied")


def _bootstrap(settings: Settings, pipeline: Pipeline, name: str) -> None:
    """Starts a consumer that has applied nothing yet from the canonical rows and their position."""
    spec, *others = find_reconciliations(pipeline, name)
    with open_connections(settings, "bootstrap") as servers:
        if not has_never_applied(servers.connect, pipeline.scope, spec.consumer):
            say(f"{name} has begun already; it continues from its checkpoints")
            return
        with open_comparer(settings, servers, [spec, *others]) as comparer:
            outcome = reconcile(
                servers.connect, pipeline.scope, spec, comparer, intent="bootstrap", others=others
            )
    say(
        f"{name} begins with {format_count(outcome.repaired, 'row')} from the tables, at tick "
        f"{outcome.tick}"
    )


def _parse_shards(text: str, shards: int) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [-1]
    if not numbers or numbers[0] < 0 or numbers[-1] >= shards:
        raise InvalidSetting(
            f"--shards {text}: give numbers from 0 to {shards - 1}, comma-separated"
        )
    return numbers


def _count(result: Consumed) -> Counter[str]:
    """Returns the counters of ``--json``; ``repeated`` effects had happened before."""
    names = ("applied", "cancelled", "dead", "snoozed", "retried", "stale")
    return Counter(repeated=result.skipped, **{name: getattr(result, name) for name in names})


@command("concurrency", "listen")
def work(
    settings: Settings,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names of the workers; by default all."),
    ] = None,
    drain: Annotated[
        bool,
        typer.Option("--drain", help="Exit when the queues are empty, except for jobs due later."),
    ] = False,
    json: Json = False,
) -> None:
    """Do the jobs of queues. Several processes share the jobs. SIGTERM and Ctrl-C give unstarted
    jobs back at once; a second Ctrl-C also gives running jobs back.
    """
    stop = Stop()
    pipeline = require_pipeline(settings)
    workers = _find_workers(pipeline, names or [])
    total = _count(Consumed())
    with (
        observed(settings, pipeline),
        servers(settings, schema=pipeline.scope.schema) as urls,
        ProgressLine("done") as progress,
        spared_from_garbage_collection(),
    ):

        def report(result: RoundResult | Consumed) -> None:
            assert isinstance(result, Consumed)
            total.update(_count(result))
            progress.add(result)

        how: dict[str, Any] = {"prepare": settings.prepare, "concurrency": settings.concurrency}
        for spec in workers if drain else ():
            run_loop(
                make_worker(pipeline, spec, urls.database_url, urls.redis_url, **how),
                stop,
                report,
                drain=True,
            )
            raise_if_stopped(settings, pipeline, spec.name)
        if not drain:
            how |= {"consumers": [spec.name for spec in workers], "streamer": False, "stop": stop}
            inline.run(
                pipeline,
                urls.database_url,
                urls.redis_url,
                report=lambda _, result: report(result),
                **how,
            )
    if json:
        show_json(total)
    say(f"{format_count(progress.count, 'job')} done")


def _find_workers(pipeline: Pipeline, names: list[str]) -> list[WorkerSpec]:
    """Returns the workers of these names; all, if there are none."""
    chosen = [pipeline.get_consumer(name) for name in names] or [
        spec for spec in pipeline.consumers.values() if isinstance(spec, WorkerSpec)
    ]
    others = [spec.name for spec in chosen if not isinstance(spec, WorkerSpec)]
    if others:
        raise DeclarationError(
            f"{others[0]} is the consumer of a {pipeline.get_consumer(others[0]).channel.kind}, "
            "not the worker of a queue: "
            f"penstock consume {others[0]}"
        )
    if not chosen:
        raise DeclarationError(
            "the pipeline declares no worker of a queue: @pipeline.worker(reads=…)"
        )
    return [spec for spec in chosen if isinstance(spec, WorkerSpec)]
