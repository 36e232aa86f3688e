"""``penstock stream``: sequences and publishes what applications stage."""

from typing import Annotated

import typer

from penstock.cli.commands.progress import Progress
from penstock.cli.render import say
from penstock.cli.servers import servers
from penstock.cli.signals import Stop
from penstock.cli.verbs import pipeline_of, verb
from penstock.settings import Settings


@verb("idle", "resend_chance")
def stream(
    settings: Settings,
    drain: Annotated[
        bool, typer.Option("--drain", help="End when everything staged is published.")
    ] = False,
) -> None:
    """Sequence and publish what is staged; any number of these may run."""
    from penstock.streaming import RoundResult, Streamer  # noqa: PLC0415  not for `--help`

    stop = Stop()
    pipeline = pipeline_of(settings)
    with servers(settings, schema=pipeline.schema) as urls, Progress("published") as progress:
        streamer = Streamer(
            pipeline,
            urls.database_url,
            urls.redis_url,
            idle_s=settings.idle,
            prepare=settings.prepare,
            resend_chance=settings.resend_chance,
        )

        def report(done: RoundResult) -> None:
            progress.add(done.added)
            if drain and stop():
                raise typer.Exit(0)

        if drain:
            try:
                streamer.drain(report)
            finally:
                streamer.close()
        else:
            streamer.run(stop, report)
    say(f"{progress.count:,} records published")
