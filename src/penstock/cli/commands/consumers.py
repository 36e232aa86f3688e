"""``penstock consumers``: who is registered, and so holds records back from retention."""

from typing import Annotated

import typer

from penstock.cli.connections import connected
from penstock.cli.render import say, show, show_json, show_table
from penstock.cli.verbs import Json, Yes, verb
from penstock.settings import Settings

consumers = typer.Typer(no_args_is_help=True)


@consumers.command("list")
@verb()
def list_(settings: Settings, json: Json = False) -> None:
    """List the registered consumers."""
    from penstock.operating.consumers import registered  # noqa: PLC0415  not for `--help`

    with connected(settings, "consumers") as servers:
        found = registered(servers.connection, schema=servers.schema)
    if json:
        show_json(found)
        return
    show_table(
        ("consumer", "reads", "#shards", "#passed", "#lag", "#dead letters", "moved at"),
        (
            (
                each.consumer,
                each.channel,
                each.shards,
                each.passed,
                each.lag,
                each.dead_letters,
                each.moved_at,
            )
            for each in found
        ),
    )


@consumers.command("retire")
@verb()
def retire(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the consumer.")],
    yes: Yes = False,
) -> None:
    """Forget a consumer: its checkpoints and dead letters. Retention no longer waits for it."""
    from penstock.operating.consumers import retire as forget  # noqa: PLC0415  not for `--help`

    with connected(settings, "consumers") as servers:
        found = forget(servers.connection, name, apply=yes, schema=servers.schema)
        declared = servers.pipeline is not None and name in servers.pipeline.consumers
    for each in found:
        show(
            f"{'retired' if yes else 'would retire'} {name}: {each.shards} checkpoints on {each.channel}, "
            f"{each.lag:,} records not passed, {each.dead_letters:,} dead letters removed"
        )
    if declared:
        say(
            f"The pipeline still declares {name}: it is registered again, as new, when it or the streamer starts."
        )
    if not yes:
        say("Nothing was changed. To carry it out: --yes")
