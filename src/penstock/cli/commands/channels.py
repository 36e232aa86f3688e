"""``penstock channels``: the registered channels, and changes of them while they are used."""

from typing import Annotated

import typer

from penstock.cli.command import NOTHING_CHANGED, Apply, Json, command
from penstock.cli.render import say, seconds, show, show_json, show_table
from penstock.cli.servers import open_connections
from penstock.operating.channels import ListedChannel, Retirement, adopt_channel, list_channels, retire_channel
from penstock.operating.resharding import ReshardPlan, reshard
from penstock.settings import Settings

channels = typer.Typer(no_args_is_help=True, help="List channels, or change one while it is used.")


@channels.command("list")
@command()
def list_(settings: Settings, json: Json = False) -> None:
    """List the registered channels."""
    with open_connections(settings, "channels") as servers:
        found = list_channels(servers.connection, servers.pipeline, scope=servers.scope)
    if json:
        show_json(found)
        return
    show_table(
        ("channel", "kind", "#shards", "keep", "entries", "#records", "consumers", "remarks"),
        (
            (
                each.channel,
                each.kind,
                each.shards,
                seconds(each.keep_s),
                _entries(each),
                each.records,
                ", ".join(each.consumers),
                "not declared" if each.declared is False else "",
            )
            for each in found
        ),
    )


def _entries(channel: ListedChannel) -> str:
    if channel.kind != "log" or channel.entries == "plain":
        return channel.entries if channel.kind == "log" else ""
    return "packed" if channel.entries == "none" else f"packed, {channel.entries}"


@channels.command("retire")
@command()
def retire_(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the channel.")],
    discard: Annotated[bool, typer.Option("--discard", help="Also lose the records that were not read.")] = False,
    apply: Apply = False,
) -> None:
    """Remove a channel with all it holds. Nothing can be staged for it afterwards."""
    with open_connections(settings, "channels") as servers:
        plan = retire_channel(
            servers.connection, servers.client, name, discard=discard, apply=apply, scope=servers.scope
        )
        declared = servers.pipeline is not None and name in servers.pipeline.channels
    _show_retirement(plan)
    if declared:
        say(f"The pipeline still declares {name}: staging for it and consuming it are refused.")
    if not apply:
        say(NOTHING_CHANGED)


def _show_retirement(plan: Retirement) -> None:
    what = plan.channel if plan.kind is None else f"{plan.channel}, {plan.kind} of {plan.shards} shards"
    show(
        f"{'retired' if plan.applied else 'would retire'} {what}: {plan.records:,} records in the journal, "
        f"{plan.staged:,} staged and not sequenced"
    )
    for each in plan.readers:
        show(f"    {each.consumer}: {each.unread:,} records not passed, {each.dead_letters:,} dead letters removed")
    if plan.unread and not plan.applied:
        show(f"    {plan.unread:,} records were not read, and would be lost: only with --discard")


@channels.command("adopt")
@command()
def adopt_(
    settings: Settings, name: Annotated[str, typer.Argument(help="Name of a retired channel.")], apply: Apply = False
) -> None:
    """Let the name of a retired channel be used again, for a new one."""
    with open_connections(settings, "channels") as servers:
        adopt_channel(servers.connection, servers.client, name, apply=apply, scope=servers.scope)
    show(f"{'adopted' if apply else 'would adopt'} {name}: a pipeline may declare it anew")
    if not apply:
        say(NOTHING_CHANGED)


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
        say(f"Now deploy applications and workers with shards={plan.after}, in any order: docs/how-to/reshard.md")
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
