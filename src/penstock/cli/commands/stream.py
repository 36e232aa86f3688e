"""``penstock stream``: sequences and publishes staged records."""

from typing import Annotated

import typer

from penstock.cli.command import command, require_pipeline
from penstock.cli.loops import ProgressLine, Stop, choose_share, run_loop
from penstock.cli.render import say
from penstock.cli.servers import servers
from penstock.errors import InvalidSetting
from penstock.settings import Settings
from penstock.streaming import Streamer


@command("idle", "share")
def stream(
    settings: Settings,
    drain: Annotated[bool, typer.Option("--drain", help="Exit when every staged record is published.")] = False,
) -> None:
    """Sequence and publish staged records; several of these may run at once."""
    stop = Stop()
    pipeline = require_pipeline(settings)
    share = choose_share(settings)
    if drain and not share.is_whole:
        raise InvalidSetting("--drain publishes everything: leave out the share")
    with servers(settings, schema=pipeline.scope.schema) as urls, ProgressLine("published") as progress:
        streamer = Streamer(
            pipeline, urls.database_url, urls.redis_url, idle_s=settings.idle, prepare=settings.prepare, share=share
        )
        run_loop(streamer, stop, progress, drain=drain)
    say(f"{progress.count:,} records published")
