"""``penstock status``: how far everything is."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.connections import Connected, connected
from penstock.cli.render import say, seconds, show, show_json, table_text
from penstock.cli.signals import Stop
from penstock.cli.verbs import Json, verb
from penstock.errors import ServerUnavailable
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.operating.status import IckStatus, Status

CLEAR = "\x1b[H\x1b[2J"


@verb()
def status(
    settings: Settings,
    json: Json = False,
    by_shard: Annotated[bool, typer.Option("--by-shard", help="A row a shard.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again, until a signal comes.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks, with --watch.")
    ] = 1.0,
) -> None:
    """Show how far records are staged, sequenced, published and applied."""
    stop = Stop() if watch else None
    with connected(settings, "status") as servers:
        if stop is None:
            found = _shown(servers, json=json, by_shard=by_shard)
            if found.redis is not None:
                raise ServerUnavailable(found.redis)
            return
        while not stop():
            if sys.stdout.isatty() and not json:
                show(CLEAR)
            found = _shown(servers, json=json, by_shard=by_shard)
            if found.redis is not None:
                say(f"warning: {found.redis}")
            stop.wait(every)


def _shown(servers: Connected, *, json: bool, by_shard: bool) -> "Status":
    from penstock.operating.status import status as ask  # noqa: PLC0415  not for `--help`

    found = ask(
        servers.connection,
        servers.client,
        servers.pipeline,
        schema=servers.schema,
        namespace=servers.namespace,
    )
    if json:
        show_json(found)
    else:
        show(_text(found, by_shard=by_shard))
    return found


def _text(found: "Status", *, by_shard: bool) -> str:
    head = f"epoch {found.epoch} · tick {found.tick}, {seconds(found.tick_s)} ago"
    if (open_for := found.oldest_transaction) is not None:
        head += (
            f" · oldest transaction {seconds(open_for.age_s)} "
            f"(process {open_for.pid}, {open_for.application or 'unnamed'}, {open_for.state})"
        )
    parts = [head, "", _channels(found, by_shard=by_shard)]
    if icks := _icks(found, by_shard=by_shard):
        parts += ["", icks]
    if found.consumers:
        parts += ["", _consumers(found, by_shard=by_shard)]
    if any(consumer.declared is False for consumer in found.consumers):
        parts.append("* not declared by the pipeline that --app names")
    if found.reconciliations:
        parts += ["", _reconciliations(found)]
    parts += [f"halted: {consumer} {shard}: {reason}" for consumer, shard, reason in found.halted]
    parts += [
        f"damaged: {channel.channel}/{shard.shard}: {shard.ick.damage}"
        for channel in found.channels
        for shard in channel.shards
        if shard.ick is not None and shard.ick.damage is not None
    ]
    return "\n".join(parts)


def _channels(found: "Status", *, by_shard: bool) -> str:
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
    rows: list[tuple[object, ...]] = []
    for channel in found.channels:
        keep = None if channel.keep_s is None else seconds(channel.keep_s)
        if by_shard:
            rows += [
                (
                    f"{channel.channel}/{s.shard}",
                    channel.kind,
                    1,
                    keep,
                    s.staged,
                    s.sequenced,
                    s.published,
                    s.entries,
                )
                for s in channel.shards
            ]
            continue
        published = [s.published for s in channel.shards if s.published is not None]
        entries = [s.entries for s in channel.shards if s.entries is not None]
        rows.append(
            (
                channel.channel,
                channel.kind,
                len(channel.shards),
                keep,
                sum(s.staged for s in channel.shards),
                sum(s.sequenced for s in channel.shards),
                sum(published) if published else None,
                sum(entries) if entries else None,
            )
        )
    return table_text(columns, rows)


def _icks(found: "Status", *, by_shard: bool) -> str:
    """What is dirty; empty where there is no Ick."""
    rows: list[tuple[object, ...]] = []
    for channel in found.channels:
        icks = {shard.shard: shard.ick for shard in channel.shards if shard.ick is not None}
        if by_shard:
            rows += [_ick_row(f"{channel.channel}/{n}", [ick]) for n, ick in icks.items()]
        elif icks:
            rows.append(_ick_row(channel.channel, list(icks.values())))
    columns = ("ick", "#dirty", "#held", "#reserved", "#oldest", "#folded", "held by")
    return table_text(columns, rows) if rows else ""


def _ick_row(name: str, icks: "list[IckStatus]") -> tuple[object, ...]:
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


def _consumers(found: "Status", *, by_shard: bool) -> str:
    columns = (
        "consumer",
        "reads",
        "#passed",
        "#lag",
        "#behind",
        "#applied",
        "#skipped",
        "#set aside",
        "halted",
    )
    rows: list[tuple[object, ...]] = []
    for consumer in found.consumers:
        if by_shard:
            rows += [
                (
                    consumer.consumer,
                    f"{consumer.channel}/{s.shard}",
                    s.checkpoint,
                    s.lag,
                    float(s.lag_s),
                    s.applied,
                    s.skipped,
                    s.set_aside,
                    s.halted is not None,
                )
                for s in consumer.shards
            ]
            continue
        shards = consumer.shards
        rows.append(
            (
                consumer.consumer + ("*" if consumer.declared is False else ""),
                consumer.channel,
                sum(s.checkpoint for s in shards),
                sum(s.lag for s in shards),
                float(max((s.lag_s for s in shards), default=0.0)),
                sum(s.applied for s in shards),
                sum(s.skipped for s in shards),
                sum(s.set_aside for s in shards),
                sum(s.halted is not None for s in shards),
            )
        )
    return table_text(columns, rows)


def _reconciliations(found: "Status") -> str:
    columns = ("reconciliation", "#ago", "last run", "#compared", "#differed", "#mended", "outcome")
    return table_text(
        columns,
        [
            (r.name, r.ago_s, r.intent, r.compared, r.differences, r.repaired, r.outcome)
            for r in found.reconciliations
        ],
    )
