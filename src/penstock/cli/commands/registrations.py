"""``penstock consumers``, ``channels`` and ``asyncapi``: what is registered and declared."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.channels.queue.inspection import MAX_TENANTS, busiest_tenants
from penstock.cli.command import (
    DIFFERENCES,
    NOTHING_CHANGED,
    Apply,
    Json,
    command,
    require_pipeline,
    subcommand,
    whoami,
)
from penstock.cli.connecting import open_connections
from penstock.cli.render import say, show, show_found, show_json
from penstock.database.registry import PauseKind
from penstock.display import format_count, format_seconds
from penstock.errors import InvalidSetting
from penstock.operating.channels import (
    ListedChannel,
    ReshardPlan,
    adopt_channel,
    find_channel,
    list_channels,
    reshard,
    retire_channel,
)
from penstock.operating.consumers import RegisteredConsumer, list_consumers, rename, retire
from penstock.operating.contracts import find_breaks, make_asyncapi
from penstock.operating.pausing import find_pauses, pause, resume, run_schedule
from penstock.parsing import parse_json
from penstock.settings import Settings

consumers = typer.Typer(
    no_args_is_help=True, help="List, pause, rename or retire registered consumers."
)
channels = typer.Typer(
    no_args_is_help=True, help="List channels, or change a channel while it is in use."
)
schedules = typer.Typer(no_args_is_help=True, help="Pause a schedule, resume it, or run it now.")

ConsumerName = Annotated[str, typer.Argument(help="Name of the consumer.")]
ChannelName = Annotated[str, typer.Argument(help="Name of the channel.")]
ScheduleName = Annotated[str, typer.Argument(help="Name of the schedule.")]
Reason = Annotated[str, typer.Option("--reason", help="Reason to show with the pause.")]
By = Annotated[
    str | None, typer.Option("--by", help="Operator; by default the user of this machine.")
]


@subcommand(consumers, "list")
def list_consumers_(settings: Settings, json: Json = False) -> None:
    """List the registered consumers."""
    with open_connections(settings, "consumers") as servers:
        rows = list_consumers(servers.store)
    show_found(
        rows, "consumer, reads=channel, #shards, #passed, #lag, #dead letters, moved at", json=json
    )


@subcommand(consumers, "retire")
def retire_consumer(settings: Settings, name: ConsumerName, apply: Apply = False) -> None:
    """Remove a consumer's checkpoints and dead letters. Retention no longer waits for it."""
    with open_connections(settings, "consumers") as servers:
        rows = retire(servers.store, name, apply=apply)
        declared = servers.pipeline is not None and name in servers.pipeline.consumers
    for row in rows:
        show(f"{'retired' if apply else 'would retire'} {name}: {_progress(row)} removed")
    if not rows:
        show(
            f"{'freed' if apply else 'would free'} {name}: the name that a consumer had before it "
            "was renamed"
        )
    if any(row.lag is None for row in rows):
        say(f"The sources still wait for {name}: retire it in the database of each, too.")
    if declared:
        say(
            f"The pipeline still declares {name}: when it or the streamer starts, it is registered "
            "again, as new."
        )
    if not apply:
        say(NOTHING_CHANGED)


@subcommand(consumers, "rename")
def rename_consumer(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Current name of the consumer.")],
    new: Annotated[str, typer.Argument(help="New name of the consumer.")],
    apply: Apply = False,
) -> None:
    """Rename a consumer. It keeps its checkpoints and dead letters. A worker with the old name
    stops.
    """
    with open_connections(settings, "consumers") as servers:
        replaced = list_consumers(servers.store, new)
        rows = rename(servers.store, name, new, apply=apply)
    for row in rows:
        show(f"{'renamed' if apply else 'would rename'} {name} to {new}: {_progress(row)}")
    if replaced:
        show(f"    the registration of {new}, which has applied nothing, is replaced")
    if any(row.lag is None for row in rows):
        say(
            f"The sources still wait for {name}. Once {new} is in penstock consumers list at each "
            f"of them, retire {name} there: penstock consumers retire {name} --apply"
        )
    say(
        f"Now deploy workers that declare the consumer as {new}; those that still declare {name} "
        "stop."
        if apply
        else NOTHING_CHANGED
    )


@subcommand(consumers, "pause")
def pause_consumer(
    settings: Settings, name: ConsumerName, reason: Reason, operator: By = None
) -> None:
    """Pause a consumer until it is resumed. Nothing is lost: retention waits for it."""
    _pause(settings, "consumer", name, reason, operator)


@subcommand(consumers, "resume")
def resume_consumer(settings: Settings, name: ConsumerName) -> None:
    """Resume a paused consumer."""
    _resume(settings, "consumer", name)


def _pause(
    settings: Settings, kind: PauseKind, name: str, reason: str, operator: str | None
) -> None:
    with open_connections(settings, "pause") as servers:
        paused = pause(servers.store, kind, name, reason=reason, by=operator or whoami())
    show(f"{paused}")
    effect = (
        "No job is staged"
        if kind == "schedule"
        else "Work in progress is finished, and nothing new is started,"
    )
    say(f"{effect} until: {paused.how_to_resume}")


def _resume(settings: Settings, kind: PauseKind, name: str) -> None:
    with open_connections(settings, "resume") as servers:
        resumed = resume(servers.store, kind, name)
        others = find_pauses(servers.store, kind, name)
    show(
        f"{kind} {name} was not paused"
        if resumed is None
        else f"resumed {kind} {name}, paused by {resumed.paused_by}: {resumed.reason}"
    )
    for other in others:
        say(f"It still waits: {other}; to resume: {other.how_to_resume}")


def _progress(consumer: RegisteredConsumer) -> str:
    """Returns checkpoints, records and dead letters; the lag in a source is not known here."""
    behind = "" if consumer.lag is None else f"{consumer.lag:,} not passed, "
    return (
        f"{format_count(consumer.shards, 'checkpoint')} on {consumer.channel}, "
        f"{format_count(consumer.passed, 'record')} passed, {behind}"
        f"{format_count(consumer.dead_letters, 'dead letter')}"
    )


@subcommand(channels, "list")
def list_channels_(settings: Settings, json: Json = False) -> None:
    """List the registered channels."""
    with open_connections(settings, "channels") as servers:
        rows = list_channels(servers.store, servers.pipeline)
    show_found(
        rows,
        "channel, kind, #shards, keep, entries, #records, consumers, remarks",
        json=json,
        keep=lambda channel: format_seconds(channel.keep_s),
        entries=_entries,
        consumers=lambda channel: ", ".join(channel.consumers),
        remarks=lambda channel: "not declared" if channel.declared is False else "",
    )


def _entries(channel: ListedChannel) -> str:
    if channel.kind != "log" or channel.entries == "plain":
        return channel.entries if channel.kind == "log" else ""
    return "packed" if channel.entries == "none" else f"packed, {channel.entries}"


@subcommand(channels, "tenants")
def list_tenants(
    settings: Settings,
    name: ChannelName,
    count: Annotated[int, typer.Option(min=1, help="Maximum number of tenants.")] = 50,
    json: Json = False,
) -> None:
    """List the tenants with the most messages in a queue."""
    with open_connections(settings, "channels") as servers:
        registered = find_channel(servers.store, name)
        if not registered.traits.has_jobs:
            raise InvalidSetting(
                f"{name} is not a queue, and only queues have tenants: penstock channels list"
            )
        tenants, are_all = busiest_tenants(
            servers.client, servers.store.scope.namespace, registered.shard_names, count
        )
    show_found(tenants, "tenant, #waiting, #in flight, state, shard", json=json)
    if not are_all:
        say(f"There are more than {MAX_TENANTS:,} tenants: others may have as many.")


@subcommand(channels, "pause")
def pause_channel(
    settings: Settings, name: ChannelName, reason: Reason, operator: By = None
) -> None:
    """Pause a queue, or all consumers of a log. Records can still be staged."""
    _pause(settings, "channel", name, reason, operator)


@subcommand(channels, "resume")
def resume_channel(settings: Settings, name: ChannelName) -> None:
    """Resume the consumers of a paused channel."""
    _resume(settings, "channel", name)


@subcommand(schedules, "pause")
def pause_schedule(
    settings: Settings, name: ScheduleName, reason: Reason, operator: By = None
) -> None:
    """Pause a schedule. It stages no job until it is resumed."""
    _pause(settings, "schedule", name, reason, operator)


@subcommand(schedules, "resume")
def resume_schedule(settings: Settings, name: ScheduleName) -> None:
    """Resume a paused schedule, which catches up as after an outage."""
    _resume(settings, "schedule", name)


@subcommand(schedules, "run")
def run_schedule_(settings: Settings, name: ScheduleName) -> None:
    """Tell a streamer to stage one more job of a schedule now."""
    with open_connections(settings, "schedules") as servers:
        run_schedule(servers.store, name)
    show(f"{name} is due now: a streamer that declares it stages its job within a second")


@subcommand(channels, "retire")
def retire_channel_(
    settings: Settings,
    name: ChannelName,
    discard: Annotated[
        bool, typer.Option("--discard", help="Also delete unread records and dead letters.")
    ] = False,
    apply: Apply = False,
) -> None:
    """Remove a channel with its content. Nothing can be staged for it afterwards."""
    with open_connections(settings, "channels") as servers:
        plan = retire_channel(servers.store, servers.client, name, discard=discard, apply=apply)
        declared = servers.pipeline is not None and name in servers.pipeline.channels
    description = (
        plan.channel
        if plan.kind is None
        else f"{plan.channel}, {plan.kind} of {format_count(plan.shards, 'shard')}"
    )
    show(
        f"{'retired' if plan.applied else 'would retire'} {description}: "
        f"{format_count(plan.records, 'record')} in the journal, "
        f"{plan.staged:,} staged and not sequenced"
    )
    for reader in plan.readers:
        show(
            f"    {reader.consumer}: {format_count(reader.unread, 'record')} not passed, "
            f"{format_count(reader.dead_letters, 'dead letter')} removed"
        )
    if plan.unread and not plan.applied:
        show(
            f"    {format_count(plan.unread, 'record')} not read yet would be lost; to discard "
            "them: --discard"
        )
    if declared:
        say(f"The pipeline still declares {name}: staging for it and consuming it are refused.")
    if not apply:
        say(NOTHING_CHANGED)


@subcommand(channels, "adopt")
def adopt_channel_(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of a retired channel.")],
    apply: Apply = False,
) -> None:
    """Free the name of a retired channel for a new channel."""
    with open_connections(settings, "channels") as servers:
        adopt_channel(servers.store, servers.client, name, apply=apply)
    show(f"{'adopted' if apply else 'would adopt'} {name}: a pipeline may declare it again")
    if not apply:
        say(NOTHING_CHANGED)


@subcommand(channels, "reshard")
def reshard_channel(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of the log.")],
    shards: Annotated[int, typer.Option("--shards", help="New number of shards.")],
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Change the number of shards of a log. No record is lost, and each key keeps its order."""
    with open_connections(settings, "channels") as servers:
        plan = reshard(servers.store, name, shards, apply=apply)
    if json:
        show_json(plan)
    elif not plan.changes:
        show(f"{plan.channel} has {format_count(plan.before, 'shard')}: there is nothing to do.")
    else:
        _show_shards(plan)
    if plan.applied:
        say(
            f"Now deploy applications and workers with shards={plan.after}, in any order: "
            "docs/how-to/reshard.md"
        )
    elif plan.changes:
        say(NOTHING_CHANGED)


def _show_shards(plan: ReshardPlan) -> None:
    last = plan.first_shard + plan.after - 1
    show(
        f"{plan.channel}: {format_count(plan.before, 'shard')} → {plan.after}, numbers "
        f"{plan.first_shard} to {last}; new records are in these "
        "from the next tick on"
    )
    for reader in plan.behind:
        show(
            f"    {reader.consumer}: {format_count(reader.lag, 'record')} of the present shards "
            "come first"
        )
        if reader.halted:
            show(
                f"    warning: {reader.consumer} is halted in "
                f"{format_count(reader.halted, 'shard')}: it reads the new shards only after "
                "the halted ones have continued"
            )


@command()
def asyncapi(
    settings: Settings,
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only list the breaking changes since this document."),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Title of the document; by default the value of --app.")
    ] = None,
    version: Annotated[str, typer.Option(help="Version of your application.")] = "1.0.0",
) -> None:
    """Print channels and payloads as AsyncAPI 3. With --check, exits with 4 if a change breaks
    old or new readers.
    """
    pipeline = require_pipeline(settings)
    document = make_asyncapi(pipeline, title or str(settings.app), version)
    if check is None:
        show_json(document)
        return
    try:
        old = parse_json(check.read_text(encoding="utf-8"))
        breaks = list(find_breaks(old, document))
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise InvalidSetting(
            f"--check {check}: no document of penstock asyncapi can be read there"
        ) from error
    show(*breaks)
    if breaks:
        raise typer.Exit(DIFFERENCES)
    say("nothing breaks")
