"""``penstock run``: streamer and consumers together, turned by an engine."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.commands.progress import Progress
from penstock.cli.render import say
from penstock.cli.servers import Servers, servers
from penstock.cli.signals import Stop
from penstock.cli.verbs import from_extra, pipeline_of, verb
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


@verb("engine", "master", "conf", "epoch_seconds", "idle", "resend_chance")
def run(
    settings: Settings,
    consumer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this consumer; may be repeated."),
    ] = None,
    streamer: Annotated[bool, typer.Option(help="Whether this process streams too.")] = True,
) -> None:
    """Run the whole pipeline: the streamer and all consumers."""
    stop = Stop()
    pipeline = pipeline_of(settings)
    names = consumer or list(pipeline.consumers)
    for name in names:
        pipeline.consumer_named(name)
    with (
        servers(settings, schema=pipeline.schema) as urls,
        Progress("published and applied") as progress,
    ):
        if settings.engine == "inline":
            _inline(settings, pipeline, urls, Work(names, streamer, stop, progress))
        else:
            _spark(settings, pipeline, urls, Work(names, streamer, stop, progress))
    say("stopped")


@dataclass(frozen=True, slots=True)
class Work:
    """What the engine is to do.

    Attributes:
        consumers: Names.
        streamer: Whether it streams too.
        stop: Asked between rounds.
        progress: Told what was done.
    """

    consumers: list[str]
    streamer: bool
    stop: Stop
    progress: Progress


def _inline(settings: Settings, pipeline: "Pipeline", urls: Servers, work: Work) -> None:
    from penstock import inline  # noqa: PLC0415  not for `--help`
    from penstock.streaming import RoundResult  # noqa: PLC0415  the same

    inline.run(
        pipeline,
        urls.database_url,
        urls.redis_url,
        consumers=work.consumers,
        streamer=work.streamer,
        stop=work.stop,
        idle_s=settings.idle,
        prepare=settings.prepare,
        resend_chance=settings.resend_chance,
        report=lambda _who, did: work.progress.add(
            did.added if isinstance(did, RoundResult) else did.applied
        ),
    )


def _spark(settings: Settings, pipeline: "Pipeline", urls: Servers, work: Work) -> None:
    with from_extra("spark", "the engine spark", ", or take --engine inline"):
        from penstock.spark.engine import application  # noqa: PLC0415  not for `--help`
    assert settings.app is not None  # the pipeline was found by it
    application.run(
        settings.app,
        pipeline,
        urls.database_url,
        urls.redis_url,
        master=settings.master,
        conf=dict(pair.partition("=")[::2] for pair in settings.conf),
        consumers=work.consumers,
        streamer=work.streamer,
        stop=work.stop,
        epoch_s=settings.epoch_seconds,
        idle_s=settings.idle,
        prepare=settings.prepare,
        resend_chance=settings.resend_chance,
    )
