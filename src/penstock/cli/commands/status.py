"""``penstock status``: how far records have come."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import typer

from penstock.cli.command import Json, command
from penstock.cli.loops import Stop
from penstock.cli.render import clear_screen, memory, say, seconds, show, show_json, show_table
from penstock.cli.servers import Connections, open_connections
from penstock.errors import ServerUnavailable
from penstock.operating.status import ChannelStatus, ConsumerStatus, IckStatus, ShardStatus, Status
from penstock.operating.status import status as read_status
from penstock.reconciling.history import LastRun
from penstock.settings import Settings
from penstock.streaming.faults import Faults

Row = tuple[object, ...]


@command()
def status(
    settings: Settings,
    json: Json = False,
    by_shard: Annotated[bool, typer.Option("--by-shard", help="One row per shard.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until interrupted.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Interval of --watch, in seconds.")] = 1.0,
) -> None:
    """Show how far records are staged, sequenced, published and applied; exits with 1 if a shard does not move."""
    stop = Stop() if watch else None
    with open_connections(settings, "status") as servers:
        if stop is None:
            _raise_unless_sound(_show(servers, json=json, by_shard=by_shard))
            return
        while not stop():
            if not json:
                clear_screen()
            found = _show(servers, json=json, by_shard=by_shard)
            if found.redis is not None:
                say(f"warning: {found.redis}")
            stop.wait(every)


def _raise_unless_sound(found: Status) -> None:
    if found.redis is not None:
        raise ServerUnavailable(found.redis)
    if not found.sound:
        raise typer.Exit(1)


def _show(servers: Connections, *, json: bool, by_shard: bool) -> Status:
    found = read_status(servers.connection, servers.client, servers.pipeline)
    if json:
        show_json(found)
    else:
        _show_tables(found, by_shard=by_shard)
        if troubles := list(_format_troubles(found)):
            show(*troubles)
    return found


def _show_tables(found: Status, *, by_shard: bool) -> None:
    show(_format_head(found), "")
    _show_channels(found, by_shard=by_shard)
    if rows := _ick_rows(found, by_shard=by_shard):
        show("")
        show_table(("ick", "#dirty", "#held", "#reserved", "#oldest", "#coalesced", "held by"), rows)
    if rows := _queue_rows(found, by_shard=by_shard):
        show("")
        show_table(("queue", "#waiting", "#leased", "#delayed", "#in postgres", "#dead", "#oldest"), rows)
    if found.consumers:
        show("")
        _show_consumers(found, by_shard=by_shard)
    if any(consumer.declared is False for consumer in found.consumers):
        show("* not declared by the pipeline that --app names")
    if found.reconciliations:
        show("")
        _show_reconciliations(found)


def _format_troubles(found: Status) -> Iterator[str]:
    """A line for each shard that does not move, or waits."""
    for consumer, shard, reason in found.halted:
        yield f"halted: {consumer} {shard}: {reason}"
    for consumer, shard, reason in found.waiting:
        yield f"waiting: {consumer} {shard}: {reason}"
    stopped = {each.shard for each in found.faults.stopped}
    for shard, reason in found.damaged:
        if shard not in stopped:
            yield f"damaged: {shard}: {reason}"
    unknown = {each.shard for each in found.faults.unknown}
    for shard, count, reason in found.unread:
        if shard not in unknown:
            yield f"unread: {shard}: {count:,} records; {reason}"
    yield from _format_faults(found.faults)


def _format_faults(faults: Faults) -> list[str]:
    """Records without an offset and shards that are not published."""
    isolated = faults.isolated
    lines = [f"isolated: record {each.id} of {each.shard}: {each.reason}" for each in isolated.first]
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


def _show_channels(found: Status, *, by_shard: bool) -> None:
    columns = ("channel", "kind", "#shards", "keep", "#staged", "#sequenced", "#published", "#in the log", "memory")
    rows: list[Row] = []
    for channel in found.channels:
        rows += _shard_rows(channel) if by_shard else [_channel_row(channel)]
    _show_if_any(columns, rows, "memory")


def _show_if_any(columns: tuple[str, ...], rows: Sequence[Row], optional: str) -> None:
    """A table without a column that says nothing of any row."""
    at = columns.index(optional)
    if not any(row[at] for row in rows):
        columns = (*columns[:at], *columns[at + 1 :])
        rows = [(*row[:at], *row[at + 1 :]) for row in rows]
    show_table(columns, rows)


def _format_keep(channel: ChannelStatus) -> str | None:
    return None if channel.keep_s is None else seconds(channel.keep_s)


def _shard_rows(channel: ChannelStatus) -> Iterator[Row]:
    for s in channel.shards:
        name = f"{channel.channel}/{s.shard}"
        keep = _format_keep(channel)
        taken = _format_memory(s.memory, s.redis_memory)
        yield name, channel.kind, 1, keep, s.staged, s.sequenced, s.published, s.records, taken


def _channel_row(channel: ChannelStatus) -> Row:
    return (
        channel.channel,
        channel.kind,
        len(channel.shards),
        _format_keep(channel),
        sum(s.staged for s in channel.shards),
        sum(s.sequenced for s in channel.shards),
        _sum_known(s.published for s in channel.shards),
        _sum_known(s.records for s in channel.shards),
        _format_memory(channel.memory, channel.redis_memory),
    )


def _format_memory(used: int | None, budget: int | None) -> str | None:
    """What a log takes in Redis, and what it may take."""
    if budget is None:
        return None
    return f"{'?' if used is None else memory(used)} of {memory(budget)}"


def _sum_known(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if one of the numbers is not known."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _ick_rows(found: Status, *, by_shard: bool) -> list[Row]:
    rows: list[Row] = []
    for channel in found.channels:
        icks = {shard.shard: shard.ick for shard in channel.shards if shard.ick is not None}
        if by_shard:
            rows += [_ick_row(f"{channel.channel}/{n}", [ick]) for n, ick in icks.items()]
        elif icks:
            rows.append(_ick_row(channel.channel, list(icks.values())))
    return rows


def _ick_row(name: str, icks: list[IckStatus]) -> Row:
    ages = [ick.oldest_s for ick in icks if ick.oldest_s is not None]
    dirtied = sum(ick.dirtied for ick in icks)
    holders = sorted({ick.holder for ick in icks if ick.holder is not None})
    return (
        name,
        _sum_known(None if ick.damage else ick.dirty for ick in icks),
        _sum_known(None if ick.damage else ick.held for ick in icks),
        _sum_known(None if ick.damage else ick.reserved for ick in icks),
        max(ages, default=None),
        f"{sum(ick.records for ick in icks) / dirtied:.1f} : 1" if dirtied else None,
        ", ".join(holders) or None,
    )


def _queue_rows(found: Status, *, by_shard: bool) -> list[Row]:
    rows: list[Row] = []
    for channel in found.channels:
        shards = [shard for shard in channel.shards if shard.queue is not None]
        if by_shard:
            rows += [_queue_row(f"{channel.channel}/{shard.shard}", [shard]) for shard in shards]
        elif shards:
            rows.append(_queue_row(channel.channel, shards))
    return rows


def _queue_row(name: str, shards: list[ShardStatus]) -> Row:
    queues = [shard.queue for shard in shards if shard.queue is not None]
    known = None if any(queue.damage for queue in queues) else queues
    return (
        name,
        known and sum(queue.waiting for queue in known),
        known and sum(queue.leased for queue in known),
        known and sum(queue.delayed for queue in known),
        sum(shard.in_postgres for shard in shards),
        known and sum(queue.dead for queue in known),
        max((queue.oldest_s for queue in queues if queue.oldest_s is not None), default=None),
    )


def _show_consumers(found: Status, *, by_shard: bool) -> None:
    columns = (
        "consumer",
        "reads",
        "halted",
        "#passed",
        "#lag",
        "#behind",
        "#evicted",
        "#applied",
        "#skipped",
        "#dead letters",
    )
    rows: list[Row] = []
    for consumer in found.consumers:
        rows += _checkpoint_rows(consumer) if by_shard else [_consumer_row(consumer)]
    _show_if_any(columns, rows, "#evicted")


def _checkpoint_rows(consumer: ConsumerStatus) -> Iterator[Row]:
    for s in consumer.shards:
        yield (
            consumer.consumer,
            f"{consumer.channel}/{s.shard}",
            s.halted is not None,
            s.checkpoint,
            s.lag,
            s.lag_s,
            s.evicted,
            s.applied,
            s.skipped,
            s.dead_letters,
        )


def _consumer_row(consumer: ConsumerStatus) -> Row:
    shards = consumer.shards
    return (
        consumer.consumer + ("*" if consumer.declared is False else ""),
        consumer.channel,
        sum(s.halted is not None for s in shards),
        sum(s.checkpoint for s in shards),
        sum(s.lag for s in shards),
        float(max((s.lag_s for s in shards), default=0.0)),
        sum(s.evicted for s in shards),
        sum(s.applied for s in shards),
        sum(s.skipped for s in shards),
        sum(s.dead_letters for s in shards),
    )


def _show_reconciliations(found: Status) -> None:
    columns = ("reconciliation", "#ago", "last run", "#compared", "#differed", "#repaired", "outcome")
    show_table(
        columns,
        [
            (r.name, r.ago_s, r.intent, r.compared, r.differences, r.repaired, _outcome(r))
            for r in found.reconciliations
        ],
    )


def _outcome(run: LastRun) -> str:
    return f"{run.outcome}, {run.remaining:,} left" if run.remaining else run.outcome
