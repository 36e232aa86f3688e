"""``penstock status``, ``doctor`` and ``metrics``: progress, safety, and Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

import typer

from penstock.channels.server import connect_redis
from penstock.cli.command import Json, command, find_pipeline, require_extra
from penstock.cli.connecting import Connections, open_connections, servers
from penstock.cli.loops import Stop
from penstock.cli.render import clear_screen, say, show, show_json, show_rows, show_table, show_text
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.display import format_count, format_memory, format_seconds
from penstock.errors import ServerUnavailable
from penstock.observing.listener import Answer, Listener
from penstock.operating.doctor.check import CheckResult
from penstock.operating.doctor.diagnosis import diagnose, worst
from penstock.operating.status.gathering import status as read_status
from penstock.operating.status.snapshot import RegisteredSchedule, Status
from penstock.pipeline import get_scope
from penstock.reconciling.reconciliation import LastRun
from penstock.settings import Settings, duration
from penstock.streaming.faults import Faults


@command()
def status(
    settings: Settings,
    json: Json = False,
    by_shard: Annotated[bool, typer.Option("--by-shard", help="One row per shard.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until interrupted.")] = False,
    every: Annotated[
        float, typer.Option(metavar="DURATION", parser=duration(), help="Interval of --watch.")
    ] = 1.0,
) -> None:
    """Show how many records are staged, sequenced, published and applied. Exits with 1 if a shard
    makes no progress.
    """
    stop = Stop() if watch else None
    with open_connections(settings, "status") as servers:
        while True:
            if stop is not None and not json:
                clear_screen()
            snapshot = _show_status(servers, json=json, by_shard=by_shard)
            if stop is None:
                break
            if snapshot.redis is not None:
                say(f"warning: {snapshot.redis}")
            if stop.wait(every):
                return
    if snapshot.redis is not None:
        raise ServerUnavailable(snapshot.redis)
    if not snapshot.sound:
        raise typer.Exit(1)


def _show_status(servers: Connections, *, json: bool, by_shard: bool) -> Status:
    snapshot = read_status(servers.store, servers.client, servers.pipeline)
    if json:
        show_json(snapshot)
    else:
        _show_tables(snapshot, by_shard=by_shard)
        if troubles := list(_format_troubles(snapshot)):
            show(*troubles)
    return snapshot


def _show_tables(snapshot: Status, *, by_shard: bool) -> None:
    show(_format_head(snapshot))
    if len(snapshot.releases) > 1:
        numbers = (f"{release} ({count})" for release, count in snapshot.releases.items())
        show(f"connections of several releases: {', '.join(numbers)}")
    channels = [*_divide(snapshot.channels, by_shard=by_shard)]
    consumers = [*_divide(snapshot.consumers, by_shard=by_shard)]
    tables = (
        (_CHANNELS, channels),
        (_ICKS, _hold(channels, "ick")),
        (_QUEUES, _hold(channels, "queue")),
        (_CONSUMERS, consumers),
    )
    for columns, rows in tables:
        if rows or columns is _CHANNELS:
            show("")
            table = {
                name: get for name, get in columns if name not in _OPTIONAL or any(map(get, rows))
            }
            show_table([*table], ([get(row) for get in table.values()] for row in rows))
    if any(consumer.declared is False for consumer in snapshot.consumers):
        show("* not declared by the pipeline that --app names")
    if snapshot.reconciliations:
        show("")
        show_rows(snapshot.reconciliations, _RECONCILIATIONS, outcome=_outcome)
    if snapshot.schedules:
        show("")
        skipped = (
            ", skipped=skipped_until"
            if any(schedule.skipped_until for schedule in snapshot.schedules)
            else ""
        )
        schedule_columns = (
            "schedule=name, channel, every=text, timezone, last=last_at, next=next_at"
        )
        show_rows(snapshot.schedules, schedule_columns + skipped, skipped_until=_skipped)


def _skipped(schedule: RegisteredSchedule) -> str:
    """Returns the last times without a staged job."""
    since, until = schedule.skipped_since, schedule.skipped_until
    return (
        ""
        if since is None or until is None
        else f"{since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M}"
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A channel or a consumer with its shards, or with one of them."""

    owner: Any
    name: str
    shards: Sequence[Any]


def _divide(owners: Iterable[Any], *, by_shard: bool) -> Iterator[_Row]:
    for owner in owners:
        if by_shard:
            yield from (
                _Row(owner, f"{owner.channel}/{shard.shard}", [shard]) for shard in owner.shards
            )
        else:
            yield _Row(owner, owner.channel, owner.shards)


def _hold(rows: Iterable[_Row], part: str) -> list[_Row]:
    """Returns the rows with the shards whose Ick, or queue, was read."""
    reduced = (
        _Row(
            row.owner, row.name, [shard for shard in row.shards if getattr(shard, part) is not None]
        )
        for row in rows
    )
    return [row for row in reduced if row.shards]


def _total(path: str) -> Callable[[_Row], int | None]:
    """Returns the sum over the shards; None if one of them is damaged or unknown."""
    part, read = path.rpartition(".")[0], attrgetter(path)

    def add(row: _Row) -> int | None:
        total = 0
        for shard in row.shards:
            if (part and getattr(shard, part).damage) or (value := read(shard)) is None:
                return None
            total += value
        return total

    return add


def _oldest(path: str) -> Callable[[_Row], float | None]:
    read = attrgetter(path)
    return lambda row: max(
        (age for shard in row.shards if (age := read(shard)) is not None), default=None
    )


def _combine_queues(path: str, combine: Callable[[Iterable[Any]], Any]) -> Callable[[_Row], Any]:
    """Returns a number of a queue over its shards; None if one of them is damaged."""
    read = attrgetter(path)

    def get(row: _Row) -> Any:
        stats = [shard.queue.stats for shard in row.shards]
        return None if None in stats else combine(map(read, stats))

    return get


def _memory(row: _Row) -> str | None:
    """Returns the memory of a log in Redis, and its budget."""
    log = row.shards[0] if len(row.shards) == 1 else row.owner
    if log.redis_memory is None:
        return None
    return (
        f"{'?' if log.memory is None else format_memory(log.memory)} of "
        f"{format_memory(log.redis_memory)}"
    )


def _coalescing(row: _Row) -> str | None:
    dirtied = sum(shard.ick.dirtied for shard in row.shards)
    return (
        f"{sum(shard.ick.records for shard in row.shards) / dirtied:.1f} : 1" if dirtied else None
    )


def _outcome(run: LastRun) -> str:
    return f"{run.outcome}, {run.remaining:,} left" if run.remaining else run.outcome


_Computed = tuple[str, Callable[[_Row], object]]

_OPTIONAL = {"memory", "#evicted"}
"""Columns that are left out if they are empty in all rows."""

_CHANNELS: tuple[_Computed, ...] = (
    ("channel", lambda row: row.name),
    ("kind", lambda row: row.owner.kind),
    ("#shards", lambda row: len(row.shards)),
    ("keep", lambda row: None if row.owner.keep_s is None else format_seconds(row.owner.keep_s)),
    *((f"#{name}", _total(name)) for name in ("staged", "sequenced", "published")),
    ("#in the log", _total("records")),
    ("memory", _memory),
)
_ICKS: tuple[_Computed, ...] = (
    ("ick", lambda row: row.name),
    *((f"#{name}", _total(f"ick.{name}")) for name in ("dirty", "held", "reserved")),
    ("#oldest", _oldest("ick.oldest_s")),
    ("#coalesced", _coalescing),
    (
        "held by",
        lambda row: ", ".join(sorted({shard.ick.holder for shard in row.shards} - {None})) or None,
    ),
)
_QUEUES: tuple[_Computed, ...] = (
    ("queue", lambda row: row.name),
    *((f"#{name}", _total(f"queue.{name}")) for name in ("waiting", "leased", "delayed")),
    ("#in postgres", _total("in_postgres")),
    ("#dead", _total("queue.dead")),
    ("#oldest", _oldest("queue.oldest_s")),
    ("#dwell p99", _combine_queues("quiet.p99_s", max)),
    ("#done", _combine_queues("done", sum)),
    ("#reclaimed", _combine_queues("reclaimed", sum)),
)
_CONSUMERS: tuple[_Computed, ...] = (
    ("consumer", lambda row: row.owner.consumer + ("*" if row.owner.declared is False else "")),
    ("reads", lambda row: row.name),
    ("halted", lambda row: sum(shard.halted is not None for shard in row.shards)),
    ("#passed", _total("checkpoint")),
    ("#lag", _total("lag")),
    ("#behind", lambda row: float(max((shard.lag_s for shard in row.shards), default=0.0))),
    *((f"#{name}", _total(name)) for name in ("evicted", "applied", "skipped")),
    ("#dead letters", _total("dead_letters")),
)
_RECONCILIATIONS = (
    "reconciliation=name, #ago=ago_s, last run=intent, #compared, #differed=differences, "
    "#repaired, outcome"
)


def _format_head(snapshot: Status) -> str:
    head = f"epoch {snapshot.epoch} · tick {snapshot.tick}, {format_seconds(snapshot.tick_s)} ago"
    if (oldest := snapshot.oldest_transaction) is None:
        return head
    return (
        f"{head} · oldest transaction {format_seconds(oldest.age_s)} "
        f"(process {oldest.pid}, {oldest.application or 'unnamed'}, {oldest.state})"
    )


def _format_troubles(snapshot: Status) -> Iterator[str]:
    """Yields a line for each shard that does not move, or waits, and for isolated records."""
    faults = snapshot.faults
    stopped = {fault.shard for fault in faults.stopped}
    unknown = {fault.shard for fault in faults.unknown}
    for consumer, shard, reason in snapshot.halted:
        yield f"halted: {consumer} {shard}: {reason}"
    for pause in snapshot.pauses:
        yield f"paused: {pause}; to resume: {pause.how_to_resume}"
    for consumer, shard, reason in snapshot.waiting:
        yield f"waiting: {consumer} {shard}: {reason}"
    yield from _format_sessions(snapshot)
    for schedule in snapshot.schedules:
        if schedule.trouble is not None:
            yield f"late: {schedule.trouble}"
    for shard, reason in snapshot.damaged:
        if shard not in stopped:
            yield f"damaged: {shard}: {reason}"
    for shard, count, reason in snapshot.unread:
        if shard not in unknown:
            yield f"unread: {shard}: {format_count(count, 'record')}; {reason}"
    yield from _format_faults(faults)


def _format_sessions(snapshot: Status) -> Iterator[str]:
    """Yields a line for each session without progress, of a consumer with lag."""
    for consumer in snapshot.consumers:
        for session in (
            snapshot.find_sessions(consumer) if any(shard.lag for shard in consumer.shards) else ()
        ):
            yield f"{session.cause}: {consumer.consumer} {session}; {session.how_to_go_on}"


def _format_faults(faults: Faults) -> Iterator[str]:
    for record in faults.isolated.first:
        yield f"isolated: record {record.id} of {record.shard}: {record.reason}"
    if (unnamed := faults.isolated.count - len(faults.isolated.first)) > 0:
        yield f"isolated: {format_count(unnamed, 'more record')}"
    for unknown in faults.unknown:
        yield (
            f"unknown: {unknown.shard}: {format_count(unknown.records, 'record')} from record "
            f"{unknown.first} on, of no registered channel"
        )
    for fault in faults.stopped:
        yield f"stopped: {fault.shard}: {fault.reason}"


@command()
def doctor(settings: Settings, json: Json = False) -> None:
    """Check for anything that endangers records. Exits with 1 if it finds an error, and with 3 if a
    server does not answer.
    """
    results = _diagnose(settings)
    if json:
        show_json(results)
    else:
        for result in results:
            show(f"{result.grade:7}  {result.check}: {result.message}")
            if result.fix and result.grade != "ok":
                first, *further = result.fix.split("\n")
                show(f"         → {first}", *(f"           {line}" for line in further))
    if any(result.unreachable for result in results):
        raise typer.Exit(ServerUnavailable.exit_code)
    if worst(results) == "error":
        raise typer.Exit(1)


def _diagnose(settings: Settings) -> list[CheckResult]:
    pipeline = find_pipeline(settings)
    with (
        servers(settings, schema=get_scope(pipeline).schema, start=False) as urls,
        connect_redis(urls.redis_url) as client,
    ):
        try:
            connection = connect_postgres(
                urls.database_url, application="doctor", prepare=settings.prepare
            )
        except ServerUnavailable as error:
            return [
                CheckResult("postgres", "error", str(error), "see --database-url", unreachable=True)
            ]
        with connection:
            return diagnose(Store(connection), client, pipeline)


@command("listen")
def metrics(
    settings: Settings,
    by_shard: Annotated[
        bool,
        typer.Option(
            "--by-shard", help="Show a series for each shard, in channels of up to 64 shards."
        ),
    ] = False,
) -> None:
    """Print or serve the pipeline's state as Prometheus metrics. One exporter is enough for a
    pipeline.
    """
    with require_extra("prometheus", "penstock metrics"):
        from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415  an extra
        from prometheus_client.exposition import CONTENT_TYPE_LATEST  # noqa: PLC0415  the same

        from penstock.observing.state_metrics import StateCollector  # noqa: PLC0415  the same
    pipeline, registry = find_pipeline(settings), CollectorRegistry()
    with servers(settings, schema=get_scope(pipeline).schema, start=False) as urls:
        collector = StateCollector(pipeline, urls.database_url, urls.redis_url, by_shard=by_shard)
        registry.register(collector)
        try:
            if settings.listen is None:
                show_text(generate_latest(registry).decode().rstrip("\n"))
                return
            stop = Stop()
            routes = {
                "/metrics": lambda _: Answer(
                    200, generate_latest(registry).decode(), CONTENT_TYPE_LATEST
                ),
                "/livez": lambda _: Answer(200, "ok\n"),  # a server that is away is a metric
            }
            with Listener(settings.listen, routes) as listener:
                say(f"Metrics: port {listener.port}, /metrics")
                while not stop.wait(3600):
                    pass
        finally:
            collector.close()
