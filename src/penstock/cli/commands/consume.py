"""``penstock consume``: one consumer, in this process."""

from typing import Annotated

import typer

from penstock.cli.commands.progress import Progress
from penstock.cli.connections import connected
from penstock.cli.render import say
from penstock.cli.servers import Servers, servers
from penstock.cli.signals import Stop
from penstock.cli.verbs import pipeline_of, verb
from penstock.errors import Halted, InvalidSetting
from penstock.settings import Settings


@verb("master", "conf")
def consume(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the consumer.")],
    drain: Annotated[
        bool, typer.Option("--drain", help="End when the log has nothing more.")
    ] = False,
    shards: Annotated[str | None, typer.Option(metavar="0,1", help="Only these shards.")] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="tables",
            help="Begin a new consumer with what the canonical tables hold now, instead of with old records.",
        ),
    ] = None,
) -> None:
    """Apply records with one consumer; several processes share its shards."""
    from penstock.consuming import Consumed, make_worker  # noqa: PLC0415  not for `--help`

    stop = Stop()
    pipeline = pipeline_of(settings)
    consumer = pipeline.get_consumer(name)
    chosen = None if shards is None else _numbers(shards, consumer.channel.shards)
    if begin not in {None, "tables"}:
        raise InvalidSetting(f"--from {begin}: it takes 'tables'")
    with servers(settings, schema=pipeline.schema) as urls, Progress("applied") as progress:
        if begin is not None:
            _bootstrap(settings, name)
        worker = make_worker(
            pipeline,
            consumer,
            urls.database_url,
            urls.redis_url,
            shards=chosen,
            prepare=settings.prepare,
        )

        def report(done: Consumed) -> None:
            progress.add(done.applied)
            if drain and stop():
                raise typer.Exit(0)

        if drain:
            try:
                worker.drain(report)
            finally:
                worker.close()
            _look_for_halted(settings, urls, name)
        else:
            worker.run(stop, report)
    say(f"{progress.count:,} records applied")


def _bootstrap(settings: Settings, name: str) -> None:
    """Canonical rows, and the position that they belong to, for a consumer that has applied nothing yet."""
    from penstock.cli.commands.reconcile import comparing, connect_of  # noqa: PLC0415  not for `--help`
    from penstock.reconciling import never_applied, reconcile  # noqa: PLC0415  the same

    pipeline = pipeline_of(settings)
    spec, *others = pipeline.find_reconciliations(name)
    with connected(settings, "bootstrap") as both:
        connect = connect_of(both)
        if not never_applied(connect, spec.consumer, pipeline.schema):
            say(f"{name} has begun already; it goes on from its checkpoints")
            return
        with comparing(settings, both) as comparer:
            done = reconcile(
                connect, spec, comparer, intent="bootstrap", schema=pipeline.schema, others=others
            )
    say(f"{name} begins with {done.repaired:,} rows from the tables, at tick {done.tick}")


def _numbers(text: str, shards: int) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [-1]
    if not numbers or numbers[0] < 0 or numbers[-1] >= shards:
        raise InvalidSetting(
            f"--shards {text}: give numbers from 0 to {shards - 1}, with commas between them"
        )
    return numbers


def _look_for_halted(settings: Settings, urls: Servers, name: str) -> None:
    """Everything was applied but for the shards that stand still: that is not a success."""
    from penstock.channels.server import connect_redis  # noqa: PLC0415  not for `--help`
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  the same
    from penstock.operating.status import status  # noqa: PLC0415  the same

    pipeline = pipeline_of(settings)
    with (
        connect_postgres(
            urls.database_url, application=f"consumer {name}", prepare=settings.prepare
        ) as connection,
        connect_redis(urls.redis_url) as client,
    ):
        found = status(connection, client, pipeline)
    standing = [str(shard) for consumer, shard, _ in found.halted if consumer == name]
    if standing:
        # The reason may hold what the handler said about a payload: it is data, and stands in the status.
        raise Halted(
            f"{name} is halted in {', '.join(standing)}; penstock status says why. Mend its cause, then: "
            f"penstock reset checkpoint {name} --resume --yes"
        )
