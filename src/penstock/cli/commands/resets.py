"""``penstock reset`` and ``penstock replay``: moving positions, and copying records."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.command import (
    NOTHING_CHANGED,
    Apply,
    Json,
    OnlyShard,
    command,
    means_position,
    parse_point,
    subcommand,
)
from penstock.cli.commands.lookups import format_record
from penstock.cli.connecting import open_connections
from penstock.cli.loops import ProgressLine
from penstock.cli.render import say, show, show_found, show_json, show_rows
from penstock.database.connections import connect_postgres
from penstock.database.store import Store
from penstock.display import format_count
from penstock.errors import InvalidSetting
from penstock.operating.replay import Replay, ReplayRequest
from penstock.operating.replay import replay as carry_out
from penstock.operating.reset.checkpoint import CheckpointTarget, reset_checkpoint, reset_ick
from penstock.operating.reset.doubt import ConsumerInDoubt, OffsetsInDoubt
from penstock.operating.reset.epoch import EpochPlan, reset_epoch
from penstock.operating.reset.source_history import AcceptedShard, reset_source
from penstock.records import parse_place
from penstock.settings import Settings

reset = typer.Typer(
    no_args_is_help=True, help="Move a checkpoint, open a new epoch, or repair an Ick."
)


@subcommand(reset, "checkpoint")
def checkpoint(
    settings: Settings,
    consumer: str,
    to: Annotated[str | None, typer.Option(metavar="OFFSET|PLACE|TIME|earliest|latest")] = None,
    shard: OnlyShard = None,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Move a consumer's checkpoint, or resume its halted shards.

    Args:
        consumer: Name of the consumer.
        to: Last offset or place (rides/2 offset 4118) that counts as applied, or earliest, latest,
            or a time (2026-11-23T14:05+01:00, in UTC if it has no zone, or 2h for two hours ago).
            Records staged at that time or later are applied again.
        resume: Resume halted shards.
    """
    if to is None and not resume:
        raise InvalidSetting(
            "reset to what? Give --to OFFSET, --to TIME, --to earliest, --to latest, or --resume"
        )
    with open_connections(settings, "reset") as servers:
        target = _parse_target(to)
        moves = reset_checkpoint(
            servers.store, consumer, target, shard=shard, resume=resume, apply=apply
        )
    columns = "consumer, shard, #from=before, #to=after, #applied again=again, #passed over, "
    columns += "#dead letters removed=dead_letters, resumes"
    show_found(moves, columns, json=json, shard=lambda move: f"{move.channel}/{move.shard}")
    if any(move.again for move in moves):
        say("Records that are applied again take effect again, unless the handler prevents it.")
    for move in moves:
        if move.removed:
            say(
                f"warning: {move.channel}/{move.shard}: "
                f"{format_count(move.removed, 'older record')} removed by retention, some of which "
                "may "
                "have been staged since that time"
            )
    if not moves:
        say("There is nothing to do.")
    elif not apply:
        say(NOTHING_CHANGED)


def _parse_target(to: str | None) -> CheckpointTarget:
    match to:
        case None | "earliest" | "latest":
            return to
        case _:
            pass
    try:
        return parse_point(to)
    except InvalidSetting as error:
        if means_position(to):
            raise
        raise InvalidSetting(
            f"--to {to} is not an offset, a place such as rides/2 offset 4118, earliest or "
            f"latest; as a time: {error}"
        ) from error


@subcommand(reset, "epoch")
def epoch(
    settings: Settings,
    lost: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """After HistoryDiverged, decide that Postgres is right: open a new epoch and replay the log.

    Args:
        lost: Write to FILE, as lines of JSON, the records that Postgres has lost.
    """
    with ExitStack() as stack:
        servers = stack.enter_context(open_connections(settings, "reset"))
        on_lost = None
        if lost is not None:
            file = stack.enter_context(lost.open("w", encoding="utf-8"))
            on_lost = lambda record: print(format_record(record, json=True), file=file)  # noqa: E731
        plan = reset_epoch(
            servers.store.connection, servers.client, servers.pipeline, apply=apply, on_lost=on_lost
        )
    if json:
        show_json(plan)
    else:
        show(*_format_plan(plan))
    if plan.reason is not None and not apply:
        say("Nothing was changed. Stop streamers and consumers, then carry it out: --apply")


@subcommand(reset, "source", "sources")
def source(
    settings: Settings,
    consumer: str,
    name: Annotated[str, typer.Argument(metavar="SOURCE")],
    to: Annotated[str | None, typer.Option(metavar="PLACE")] = None,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Accept the history of a restored source. The consumer goes back to the last record that both
    histories have.

    Args:
        consumer: Name of the consumer.
        name: Name of the source.
        to: Place of the last record that both histories have, if the source's journal does not
            show it (rides@eu/2 offset 4118); or a place after the checkpoint, to skip the records
            up to this place.
    """
    urls = settings.source_urls
    if name not in urls:
        raise InvalidSetting(
            f"the Postgres of source {name} is unknown: set PENSTOCK_SOURCES__{name.upper()} to "
            "its URL"
        )
    place = None if to is None else parse_place(to)
    with (
        open_connections(settings, "reset") as servers,
        connect_postgres(urls[name], application="reset", prepare=settings.prepare) as elsewhere,
    ):
        shards = reset_source(
            servers.store,
            Store(elsewhere, servers.store.scope),
            servers.client,
            consumer,
            name,
            to=place,
            apply=apply,
        )
    columns = "shard, #from=before, #to=after, in doubt, #given out again=again, #passed over, "
    columns += "#dead letters removed=dead_letters, resumes"
    show_found(
        shards,
        columns,
        json=json,
        in_doubt=lambda move: f"{move.after + 1} to {move.before}" if move.in_doubt else "",
    )
    if not json:
        _explain_doubt(shards)
    if not apply:
        say(NOTHING_CHANGED)


def _explain_doubt(shards: tuple[AcceptedShard, ...]) -> None:
    in_doubt = sum(shard.in_doubt for shard in shards)
    if not in_doubt:
        return
    say(
        "The records in doubt were applied, and their effects stay. The records that the source "
        "now has at these offsets are applied, too. Compare the tables."
    )
    twice = sum(shard.still_there for shard in shards)
    accounted = sum(shard.known for shard in shards)
    if twice:
        say(
            f"{twice:,} of the records in doubt are still at the source, which publishes them at "
            "other offsets: they take effect a second time."
        )
    if (others := accounted - twice) > 0:
        say(
            f"{format_count(others, 'other')} {'is' if others == 1 else 'are'} lost there."
            if twice
            else f"{accounted:,} are lost there."
        )
    if in_doubt > accounted:
        say(
            f"Redis no longer has {in_doubt - accounted:,} of them: whether these are lost is "
            "unknown."
        )


@subcommand(reset, "ick")
def ick(
    settings: Settings,
    channel: Annotated[str, typer.Argument(help="Name of the Ick.")],
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Repair a damaged Ick: rename foreign content, and mark possibly lost members again."""
    with open_connections(settings, "reset") as servers:
        repairs = reset_ick(
            servers.store.connection, servers.client, channel, servers.pipeline, apply=apply
        )
    show_found(repairs, "shard, key, found, moved to, marked again", json=json)
    if not repairs:
        say("The Ick is not damaged: there is nothing to do.")
    elif not apply:
        say(NOTHING_CHANGED)


def _format_plan(plan: EpochPlan) -> Iterator[str]:
    if plan.reason is None:
        yield f"History has not diverged in epoch {plan.epoch}: there is nothing to do."
        return
    unsequenced = plan.unsequenced or {}
    yield f"because: {plan.reason}"
    yield f"{'opened' if plan.applied else 'to open'}: epoch {plan.new_epoch}, after {plan.epoch}"
    yield f"records with transaction ids of another cluster: {plan.foreign:,}"
    yield (
        "records without an offset, which get one at the end of their shard: "
        f"{sum(unsequenced.values()):,}"
    )
    yield from (f"    {shard}: {count:,}" for shard, count in unsequenced.items())
    yield from _format_doubt(plan)
    yield f"checkpoints beyond the journal, which go back to its end: {len(plan.rewound)}"
    for rewound in plan.rewound:
        lost = (
            _format_elsewhere(rewound.consumer, rewound.shard)
            if rewound.kind == "reported"
            else "it has applied records that Postgres has lost: compare its tables"
        )
        yield (
            f"    {rewound.consumer} {rewound.shard}: {rewound.offset} → {rewound.journal}; {lost}"
        )
    yield f"streams that are deleted in Redis and replayed from the journal: {len(plan.deleted)}"
    for stream in plan.deleted:
        yield (
            f"    {stream.shard}: the log ends at {stream.log}, the journal at {stream.journal} "
            f"({stream.why})"
        )
    if plan.missing:
        yield (
            f"warning: {format_count(plan.missing, 'record')} that the journal names, missing from "
            "Postgres, cannot be replayed: "
            "see penstock doctor"
        )


def _format_doubt(plan: EpochPlan) -> Iterator[str]:
    """Yields the offsets in doubt, where their entries stay, and who has applied them."""
    count = sum(doubt.count for doubt in plan.in_doubt)
    yield f"offsets in doubt, at which the log has records that Postgres lacks: {count:,}"
    for doubt in plan.in_doubt:
        yield from _format_shard_in_doubt(doubt, is_applied=plan.applied)
    if plan.in_doubt:
        yield (
            f"    epoch {plan.new_epoch} gives these offsets to other records. A reader outside of "
            "this Postgres that has read any of these offsets must undo what it did since the "
            "first one, and read them again"
        )


def _format_shard_in_doubt(doubt: OffsetsInDoubt, *, is_applied: bool) -> Iterator[str]:
    channel, _, shard = doubt.shard.rpartition("/")
    # Evicted or retained on one side or the other.
    note = "" if doubt.compared else ", as far as can be compared: no earlier offset is in both"
    yield (
        f"    {doubt.shard}: {doubt.first} to {doubt.last}; the journal ends at "
        f"{doubt.journal}{note}"
    )
    if doubt.kept_as is not None:
        read = f"penstock tail {channel} --shard {shard} --from {doubt.first} --json"
        entries = f"read them with: {read}; they will be kept in"
        if is_applied:
            entries = "their entries are kept in"
        yield f"        {entries} {doubt.kept_as} until you delete it"
    if doubt.still_there:
        yield (
            f"        {doubt.still_there:,} of these records are still in this Postgres: they get "
            "other offsets, and are not lost; --lost FILE leaves them out"
        )
    for consumer in doubt.consumers:
        yield (
            f"        consumer {consumer.consumer} at {consumer.offset}: "
            f"{_format_applied(consumer, doubt.shard)}"
        )


def _format_applied(consumer: ConsumerInDoubt, shard: str) -> str:
    if consumer.kind == "reported":
        return _format_elsewhere(consumer.consumer, shard)
    if consumer.applied:
        compare = "" if consumer.kind == "replay" else f" (penstock reconcile {consumer.consumer})"
        return f"may have applied {consumer.applied} of them: compare its tables{compare}"
    return "was restored with its effects; it has applied none of these records"


def _format_elsewhere(consumer: str, shard: str) -> str:
    """Returns the remedy for a consumer that has only reported its checkpoint here."""
    source = shard.rpartition("/")[0].partition("@")[2]
    return (
        "its own database was not restored, and it may have applied all of these: "
        f"penstock reset source {consumer} {source}, there, once this epoch is open"
    )


METAVAR = "OFFSET|PLACE|TIME"

DONE_BEFORE = "Nothing was changed. To stage all the copies once more: --again --apply"


@command()
def replay(
    settings: Settings,
    channel: str,
    target: Annotated[str, typer.Option("--to", metavar="CHANNEL")],
    start: Annotated[str | None, typer.Option("--from", metavar=METAVAR)] = None,
    until: Annotated[str | None, typer.Option(metavar=METAVAR)] = None,
    key: str | None = None,
    shard: OnlyShard = None,
    again: Annotated[bool, typer.Option("--again")] = False,
    apply: Apply = False,
    json: Json = False,
) -> None:
    """Copy records of a log, by range or key, into another channel, as new records. Continues an
    interrupted replay.

    Args:
        channel: Log whose records are copied.
        target: Target log, queue or Ick. A record's key becomes the tenant in a queue, and the
            member in an Ick.
        start: First offset of each shard, first place, or earliest staging time
            (2026-11-23T14:05+01:00, in UTC if it has no zone, or 2h for two hours ago). By default,
            begin with the oldest record.
        until: Last offset, last place, or a time before which the records were staged. By default,
            end with the newest record at the time when the replay begins.
        key: Only records of this key.
        again: Repeat a finished replay.
    """
    first, last = (None if point is None else parse_point(point) for point in (start, until))
    request = ReplayRequest(channel, target, first, last, key, shard)
    with open_connections(settings, "replay") as servers, ProgressLine("copied") as progress:
        outcome = carry_out(servers.store, request, apply=apply, again=again, on_batch=progress.add)
    if json:
        show_json(outcome)
    else:
        _show_replay(outcome, is_plan=not apply)
    if not apply:
        say(NOTHING_CHANGED if outcome.ended_at is None else DONE_BEFORE)


def _show_replay(outcome: Replay, *, is_plan: bool) -> None:
    columns = "shard, #from=first, #to=last, #done up to=done"
    show_rows(
        outcome.shards,
        columns,
        shard=lambda shard: f"{outcome.channel}/{shard.shard}",
        done=lambda shard: max(0, shard.done),
    )
    if outcome.ended_at is not None:
        suffix = " has already been carried out" if is_plan else ""
        show(
            f"replay {outcome.replay} into {outcome.target}{suffix}: {outcome.staged:,} copies "
            f"staged, ended {outcome.ended_at:%Y-%m-%d %H:%M:%S} (UTC)"
        )
    elif outcome.replay is not None:
        show(
            f"replay {outcome.replay} into {outcome.target} was interrupted: {outcome.staged:,} "
            f"copies are staged, {outcome.records:,} are left"
        )
    else:
        show(f"{format_count(outcome.records, 'record')} would be copied into {outcome.target}")
