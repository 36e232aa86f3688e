"""Runs the streamer and the consumers in one Python process, a thread each."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.consuming import Consumed, make_worker
from penstock.parallel import Loop, run_together
from penstock.pipeline import Pipeline
from penstock.streaming import RoundResult, Streamer
from penstock.streaming.share import IDLE_S, WHOLE, Share

Report = Callable[[str, RoundResult | Consumed], None]
"""Called after each round with who ran it, ``streamer`` or a consumer's name, and its result."""


def run(  # noqa: PLR0913  what can be chosen of a run
    pipeline: Pipeline,
    database_url: str,
    redis_url: str,
    *,
    stop: Callable[[], bool],
    consumers: Sequence[str] | None = None,
    streamer: bool = True,
    idle_s: float = IDLE_S,
    prepare: bool = True,
    concurrency: int | None = None,
    sources: Mapping[str, str] | None = None,
    share: Share = WHOLE,
    report: Report = lambda _who, _did: None,
) -> None:
    """Runs the streamer and consumers until ``stop()`` is true, or one of them fails.

    Args:
        pipeline: What to run.
        database_url: Postgres.
        redis_url: Redis or Valkey.
        stop: Called between rounds, by every thread.
        consumers: Names; None takes all of the pipeline's.
        streamer: False leaves the streamer to another process.
        idle_s: Longest pause between two rounds of the streamer that found nothing, in seconds.
        prepare: Whether statements may be prepared; behind a pooler none are.
        concurrency: Jobs that each worker of a queue does at the same time; None takes what it
            declares.
        sources: URLs of the Postgres of each source, for consumers that read several, by the
            sources' names.
        share: The share of the shards that the streamer publishes, beside streamers of other
            processes.
        report: Called with the result of each round.

    Raises:
        PenstockError: Raised by one of them; the others have been stopped.
        DeclarationError: A name is not of the pipeline.
    """
    specs = [
        pipeline.get_consumer(n) for n in (pipeline.consumers if consumers is None else consumers)
    ]
    loops: dict[str, Loop] = {}
    if streamer:
        worker = Streamer(
            pipeline, database_url, redis_url, idle_s=idle_s, prepare=prepare, share=share
        )
        loops["streamer"] = worker.loop(partial(report, "streamer"))
    for spec in specs:
        runner = make_worker(
            pipeline,
            spec,
            database_url,
            redis_url,
            prepare=prepare,
            concurrency=concurrency,
            sources=sources,
        )
        loops[spec.name] = runner.loop(partial(report, spec.name))
    run_together(loops, stop)
