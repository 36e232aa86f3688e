"""``penstock run``: the streamer and all consumers, on an engine."""

from dataclasses import dataclass
from typing import Annotated

import typer

from penstock.cli.command import (
    command,
    parse_conf,
    read_sources,
    require_extra,
    require_pipeline,
    spared_from_garbage_collection,
)
from penstock.cli.engines import choose_engine
from penstock.cli.loops import ProgressLine, Stop, choose_share
from penstock.cli.render import say
from penstock.cli.servers import Servers, servers
from penstock.engines import inline
from penstock.errors import InvalidSetting
from penstock.pipeline import Pipeline
from penstock.settings import Settings
from penstock.streaming.share import Share


@command("engine", "master", "conf", "epoch_seconds", "idle", "share", "concurrency", "sources")
def run(
    settings: Settings,
    consumer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this consumer; may be repeated.")
    ] = None,
    streamer: Annotated[bool, typer.Option(help="Whether this process streams, too.")] = True,
) -> None:
    """Run the whole pipeline: the streamer and all consumers."""
    stop = Stop()
    pipeline, share = require_pipeline(settings), choose_share(settings)
    names = consumer or list(pipeline.consumers)
    for name in names:
        pipeline.get_consumer(name)
    with servers(settings, schema=pipeline.scope.schema) as urls, ProgressLine("published and applied") as progress:
        engine = choose_engine(settings, map(pipeline.get_consumer, names))
        if engine == "spark" and not share.is_whole:
            raise InvalidSetting(
                "the engine on Spark divides the shards by itself: leave out the share, or take --engine inline"
            )
        start = _run_inline if engine == "inline" else _run_on_spark
        start(settings, pipeline, urls, _Work(names, streamer, share, stop, progress))
    say("stopped")


@dataclass(frozen=True, slots=True)
class _Work:
    """What the engine runs.

    Attributes:
        consumers: Their names.
        streamer: Whether it streams, too.
        share: The share that it streams.
        stop: Called between rounds.
        progress: Counts what was done.
    """

    consumers: list[str]
    streamer: bool
    share: Share
    stop: Stop
    progress: ProgressLine


def _run_inline(settings: Settings, pipeline: Pipeline, urls: Servers, work: _Work) -> None:
    with spared_from_garbage_collection():
        inline.run(
            pipeline,
            urls.database_url,
            urls.redis_url,
            consumers=work.consumers,
            streamer=work.streamer,
            stop=work.stop,
            idle_s=settings.idle,
            prepare=settings.prepare,
            concurrency=settings.concurrency,
            sources=read_sources(settings),
            share=work.share,
            report=lambda _who, did: work.progress.add(did),
        )


def _run_on_spark(settings: Settings, pipeline: Pipeline, urls: Servers, work: _Work) -> None:
    with require_extra("spark", "the engine spark", ", or take --engine inline"):
        from penstock.engines.spark import application  # noqa: PLC0415  an optional extra
    assert settings.app is not None  # the pipeline was loaded from it
    application.run(
        settings.app,
        pipeline,
        urls.database_url,
        urls.redis_url,
        master=settings.master,
        conf=parse_conf(settings),
        consumers=work.consumers,
        streamer=work.streamer,
        stop=work.stop,
        epoch_s=settings.epoch_seconds,
        idle_s=settings.idle,
        prepare=settings.prepare,
        sources=read_sources(settings),
    )
