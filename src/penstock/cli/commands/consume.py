"""``penstock consume``: one consumer, in this process."""

from typing import Annotated

import typer

from penstock.cli.command import command, read_sources, require_pipeline, spared_from_garbage_collection
from penstock.cli.engines import open_comparer
from penstock.cli.loops import ProgressLine, Stop, raise_if_halted, run_loop
from penstock.cli.render import say
from penstock.cli.servers import open_connections, servers
from penstock.consuming import make_worker
from penstock.errors import InvalidSetting
from penstock.pipeline import Pipeline
from penstock.reconciling import find_reconciliations, has_never_applied, reconcile
from penstock.settings import Settings


@command("engine", "master", "conf", "sources")
def consume(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the consumer.")],
    drain: Annotated[bool, typer.Option("--drain", help="Exit when the log has no more records.")] = False,
    shards: Annotated[str | None, typer.Option(metavar="0,1", help="Only these shards.")] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="tables",
            help="Begin a new consumer with the current canonical rows instead of old records.",
        ),
    ] = None,
) -> None:
    """Apply records with one consumer; several processes share its shards."""
    stop = Stop()
    pipeline = require_pipeline(settings)
    consumer = pipeline.get_consumer(name)
    chosen = None if shards is None else _parse_shards(shards, consumer.channel.shards)
    if begin not in {None, "tables"}:
        raise InvalidSetting(f"--from {begin}: it takes 'tables'")
    with (
        servers(settings, schema=pipeline.scope.schema) as urls,
        ProgressLine("applied") as progress,
        spared_from_garbage_collection(),
    ):
        if begin is not None:
            _bootstrap(settings, pipeline, name)
        worker = make_worker(
            pipeline,
            consumer,
            urls.database_url,
            urls.redis_url,
            shards=chosen,
            prepare=settings.prepare,
            sources=read_sources(settings),
        )
        run_loop(worker, stop, progress, drain=drain)
        if drain:
            raise_if_halted(settings, pipeline, name)
    say(f"{progress.count:,} records applied")


def _bootstrap(settings: Settings, pipeline: Pipeline, name: str) -> None:
    """Starts a consumer that has applied nothing yet from the canonical rows and their position."""
    spec, *others = find_reconciliations(pipeline, name)
    with open_connections(settings, "bootstrap") as servers:
        if not has_never_applied(servers.connect, pipeline.scope, spec.consumer):
            say(f"{name} has begun already; it continues from its checkpoints")
            return
        with open_comparer(settings, servers, [spec, *others]) as comparer:
            done = reconcile(servers.connect, pipeline.scope, spec, comparer, intent="bootstrap", others=others)
    say(f"{name} begins with {done.repaired:,} rows from the tables, at tick {done.tick}")


def _parse_shards(text: str, shards: int) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [-1]
    if not numbers or numbers[0] < 0 or numbers[-1] >= shards:
        raise InvalidSetting(f"--shards {text}: give numbers from 0 to {shards - 1}, comma-separated")
    return numbers
