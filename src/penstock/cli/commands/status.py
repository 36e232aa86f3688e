"""``penstock status``: how far records have come."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from penstock.cli.command import Json, command
from penstock.cli.connections import Connections, open_connections
from penstock.cli.render import say, seconds, show, show_json, table_text
from penstock.cli.signals import Stop
from penstock.errors import ServerUnavailable
from penstock.operating.status import (
    ChannelStatus,
    ConsumerStatus,
    IckStatus,
    Status,
)
from penstock.operating.status import status as read_status
from penstock.settings import Settings
from penstock.streaming.faults import Faults

CLEAR = "\x1b[H\x1b[2J"

Row = tuple[object, ...]


@command()
def status(
    settings: Settings,
    json: Json = False,
    by_shard: Annotated[bool, typer.Option("--by-shard", help="One row per shard.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until interrupted.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Interval of --watch, in seconds.")] = 1.0,
) -> None:
    """Show how far records are staged, sequenced, published and applied."""
    stop = Stop() if watch else None
    with open_connections(settings, "status") as servers:
        if stop is None:
            found = _show(servers, json=json, by_shard=by_shard)
            if found.redis is not None:
                raise ServerUnavailable(found.redis)
            return
        while not stop():
            if sys.stdout.isatty() and not json:
                show(CLEAR)
            found = _show(servers, json=json, by_shard=by_shard)
            if found.redis is not None:
                say(f"warning: {found.redis}")
            stop.wait(every)


def _show(servers: Connections, *, json: bool, by_shard: bool) -> Status:
    found = read_status(servers.connection, servers.client, servers.pipeline)
    if json:
        show_json(found)
    else:
        show(_format(found, by_shard=by_shard))
    return found


def _format(found: Status, *, by_shard: bool) -> str:
    parts = [_format_head(found), "", _format_channels(found, by_shard=by_shard)]
    if icks := _format_icks(found, by_shard=by_shard):
        parts += ["", icks]
    if found.consumers:
        parts += ["", _format_consumers(found, by_shard=by_shard)]
    if any(consumer.declared is False for consumer in found.consumers):
        parts.append("* not declared by the pipeline that --app names")
    if found.reconciliations:
        parts += ["", _format_reconciliations(found)]
    parts += [f"halted: {consumer} {shard}: {reason}" for consumer, shard, reason in found.halted]
    parts += [f"{consumer} {shard}: {reason}" for consumer, shard, reason in found.waiting]
    parts += _format_faults(found.faults)
    parts += [
        f"damaged: {channel.channel}/{shard.shard}: {shard.ick.damage}"
        for channel in found.channels
        for shard in channel.shards
        if shard.ick is not None and shard.ick.damage is not None
    ]
    return "\n".join(parts)


def _format_faults(faults: Faults) -> list[str]:
    """Records without an offset and shards that are not published."""
    isolated = faults.isolated
    lines = [
        f"isolated: record {each.id} of {each.shard}: {each.reason}" for each in isolated.first
    ]
    if isolated.count > len(isolated.first):
        lines.append(f"isolated: {isolated.count - len(isolated.first):,} more records")
    lines += [
        f"unknown: {each.shard}: {each.records:,} records from record {each.first} on, of no registered channel"
        for each in faults.unknown
    ]
    return lines + [f"stopped: {each.shard}: {each.reason}" for each in faults.stopped]


def _format_head(found: Status) -> str:
    head = f"epoch {found.epoch} · tick {found.tick}, {seconds(found.tick_s)} ago"
    if (oldest := found.oldest_transaction) is None:
        return head
    return (
        f"{head} · oldest transaction {seconds(oldest.age_s)} "
        f"(process {oldest.pid}, {oldest.application or 'unnamed'}, {oldest.state})"
    )


def _format_channels(found: Status, *, by_shard: bool) -> str:
    columns = (
        "channel",
        "kind",
        "#shards",
        "keep",
        "#staged",
        "#sequenced",
        "#published",
        "#in the log",
    )
    rows: list[Row] = []
    for channel in found.channels:
        rows += _shard_rows(channel) if by_shard else [_channel_row(channel)]
    return table_text(columns, rows)


def _format_keep(channel: ChannelStatus) -> str | None:
    return None if channel.keep_s is None else seconds(channel.keep_s)


def _shard_rows(channel: ChannelStatus) -> Iterator[Row]:
    for s in channel.shards:
        name = f"{channel.channel}/{s.shard}"
        keep = _format_keep(channel)
        yield name, channel.kind, 1, keep, s.staged, s.sequenced, s.published, s.entries


def _channel_row(channel: ChannelStatus) -> Row:
    published = [s.published for s in channel.shards if s.published is not None]
    entries = [s.entries for s in channel.shards if s.entries is not None]
    return (
        channel.channel,
        channel.kind,
        len(channel.shards),
        _format_keep(channel),
        sum(s.staged for s in channel.shards),
        sum(s.sequenced for s in channel.shards),
        sum(published) if published else None,
        sum(entries) if entries else None,
    )


def _format_icks(found: Status, *, by_shard: bool) -> str:
    """The table of Icks; empty if there are none."""
    rows: list[Row] = []
    for channel in found.channels:
        icks = {shard.shard: shard.ick for shard in channel.shards if shard.ick is not None}
        if by_shard:
            rows += [_ick_row(f"{channel.channel}/{n}", [ick]) for n, ick in icks.items()]
        elif icks:
            rows.append(_ick_row(channel.channel, list(icks.values())))
    columns = ("ick", "#dirty", "#held", "#reserved", "#oldest", "#coalesced", "held by")
    return table_text(columns, rows) if rows else ""


def _ick_row(name: str, icks: list[IckStatus]) -> Row:
    ages = [ick.oldest_s for ick in icks if ick.oldest_s is not None]
    dirtied = sum(ick.dirtied for ick in icks)
    holders = sorted({ick.holder for ick in icks if ick.holder is not None})
    return (
        name,
        sum(ick.dirty for ick in icks),
        sum(ick.held for ick in icks),
        sum(ick.reserved for ick in icks),
        max(ages, default=None),
        f"{sum(ick.records for ick in icks) / dirtied:.1f} : 1" if dirtied else None,
        ", ".join(holders) or None,
    )


def _format_consumers(found: Status, *, by_shard: bool) -> str:
    columns = (
        "consumer",
        "reads",
        "#passed",
        "#lag",
        "#behind",
        "#applied",
        "#skipped",
        "#dead letters",
        "halted",
    )
    rows: list[Row] = []
    for consumer in found.consumers:
        rows += _checkpoint_rows(consumer) if by_shard else [_consumer_row(consumer)]
    return table_text(columns, rows)


def _checkpoint_rows(consumer: ConsumerStatus) -> Iterator[Row]:
    for s in consumer.shards:
        yield (
            consumer.consumer,
            f"{consumer.channel}/{s.shard}",
            s.checkpoint,
            s.lag,
            float(s.lag_s),
            s.applied,
            s.skipped,
            s.dead_letters,
            s.halted is not None,
        )


def _consumer_row(consumer: ConsumerStatus) -> Row:
    shards = consumer.shards
    return (
        consumer.consumer + ("*" if consumer.declared is False else ""),
        consumer.channel,
        sum(s.checkpoint for s in shards),
        sum(s.lag for s in shards),
        float(max((s.lag_s for s in shards), default=0.0)),
        sum(s.applied for s in shards),
        sum(s.skipped for s in shards),
        sum(s.dead_letters for s in shards),
        sum(s.halted is not None for s in shards),
    )


def _format_reconciliations(found: Status) -> str:
    columns = (
        "reconciliation",
        "#ago",
        "last run",
        "#compared",
        "#differed",
        "#repaired",
        "outcome",
    )
    return table_text(
        columns,
        [
            (r.name, r.ago_s, r.intent, r.compared, r.differences, r.repaired, r.outcome)
            for r in found.reconciliations
        ],
    )
