"""``penstock consumers``: the registered consumers, for which retention keeps records."""

from typing import Annotated

import typer

from penstock.cli.command import NOTHING_CHANGED, Apply, Json, command
from penstock.cli.render import say, show, show_json, show_table
from penstock.cli.servers import open_connections
from penstock.operating.consumers import RegisteredConsumer, list_consumers, rename, retire
from penstock.settings import Settings

consumers = typer.Typer(
    no_args_is_help=True, help="List, rename or retire registered consumers: retention waits for them."
)


@consumers.command("list")
@command()
def list_(settings: Settings, json: Json = False) -> None:
    """List the registered consumers."""
    with open_connections(settings, "consumers") as servers:
        found = list_consumers(servers.connection, scope=servers.scope)
    if json:
        show_json(found)
        return
    show_table(
        ("consumer", "reads", "#shards", "#passed", "#lag", "#dead letters", "moved at"),
        (
            (each.consumer, each.channel, each.shards, each.passed, each.lag, each.dead_letters, each.moved_at)
            for each in found
        ),
    )


@consumers.command("retire")
@command()
def retire_(
    settings: Settings, name: Annotated[str, typer.Argument(help="Name of the consumer.")], apply: Apply = False
) -> None:
    """Remove a consumer's checkpoints and dead letters. Retention no longer waits for it."""
    with open_connections(settings, "consumers") as servers:
        found = retire(servers.connection, name, apply=apply, scope=servers.scope)
        declared = servers.pipeline is not None and name in servers.pipeline.consumers
    for each in found:
        show(f"{'retired' if apply else 'would retire'} {name}: {_progress(each)} removed")
    if not found:
        show(f"{'freed' if apply else 'would free'} {name}: the name that a consumer had before it was renamed")
    if any(each.lag is None for each in found):
        say(f"The sources still wait for {name}: retire it in the database of each, too.")
    if declared:
        say(
            f"The pipeline still declares {name}: when it or the streamer starts, it is registered again as a new consumer."
        )
    if not apply:
        say(NOTHING_CHANGED)


@consumers.command("rename")
@command()
def rename_(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the consumer now.")],
    new: Annotated[str, typer.Argument(help="Its name from now on.")],
    apply: Apply = False,
) -> None:
    """Rename a consumer. Its checkpoints and dead letters stay; a worker with the old name stops."""
    with open_connections(settings, "consumers") as servers:
        replaced = list_consumers(servers.connection, new, scope=servers.scope)
        found = rename(servers.connection, name, new, apply=apply, scope=servers.scope)
    for each in found:
        show(f"{'renamed' if apply else 'would rename'} {name} to {new}: {_progress(each)}")
    if replaced:
        show(f"    the registration of {new}, which has applied nothing, is replaced")
    if any(each.lag is None for each in found):
        say(
            f"The sources go on waiting for {name}. Once {new} is in penstock consumers list at each of them, retire {name} "
            f"there: penstock consumers retire {name} --apply"
        )
    say(
        f"Now deploy workers that declare the consumer as {new}; those that still declare {name} stop."
        if apply
        else NOTHING_CHANGED
    )


def _progress(each: RegisteredConsumer) -> str:
    """Checkpoints, records and dead letters; what a source has beyond the checkpoints is not known here."""
    behind = "" if each.lag is None else f"{each.lag:,} not passed, "
    return (
        f"{each.shards} checkpoints on {each.channel}, {each.passed:,} records passed, {behind}"
        f"{each.dead_letters:,} dead letters"
    )
