"""``penstock channels``: changes of registered channels, while they are used."""

from typing import Annotated

import typer

from penstock.cli.command import NOTHING_CHANGED, Apply, Json, command
from penstock.cli.connections import open_connections
from penstock.cli.render import say, show, show_json
from penstock.operating.resharding import ReshardPlan, reshard
from penstock.settings import Settings

channels = typer.Typer(no_args_is_help=True, help="Change a channel while it is used.")


@channels.command("reshard")
@command()
def reshard_(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the log.")],
    shards: Annotated[int, typer.Option("--shards", help="Number of shards from now on.")],
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Give a log more or fewer shards. No record is lost, and each key keeps its order."""
    with open_connections(settings, "channels") as servers:
        plan = reshard(servers.connection, name, shards, apply=apply, scope=servers.scope)
    if json:
        show_json(plan)
    else:
        _show_plan(plan)
    if plan.applied:
        say(
            f"Now deploy applications and workers with shards={plan.after}, in any order: docs/how-to/reshard.md"
        )
    elif plan.changes:
        say(NOTHING_CHANGED)


def _show_plan(plan: ReshardPlan) -> None:
    if not plan.changes:
        show(f"{plan.channel} has {plan.before} shards: there is nothing to do.")
        return
    last = plan.first_shard + plan.after - 1
    show(
        f"{plan.channel}: {plan.before} shards → {plan.after}, numbers {plan.first_shard} to {last}; new records are in these "
        "from the next tick on"
    )
    for each in plan.behind:
        show(f"    {each.consumer}: passes {each.lag:,} records of the present shards before")
        if each.halted:
            show(
                f"    warning: {each.consumer} is halted in {each.halted} shards: it applies nothing of the new ones before these go on"
            )
