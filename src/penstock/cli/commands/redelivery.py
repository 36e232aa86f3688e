"""``penstock dead-letters``: inspects, retries or drops dead letters."""

from dataclasses import replace
from typing import Annotated

import typer

from penstock.cli.command import NOTHING_CHANGED, Apply, Json, require_pipeline, subcommand
from penstock.cli.connecting import Connections, open_connections
from penstock.cli.engines import open_frames
from penstock.cli.render import payload_lines, say, show, show_found, with_payload
from penstock.consuming.letter_retry import DeadLetterRow
from penstock.display import format_count
from penstock.errors import InvalidSetting, Unknown
from penstock.operating import letters
from penstock.operating.consumers import check_registered
from penstock.operating.letters import LetterFilter
from penstock.operating.letters import retry as retry_letters
from penstock.records import parse_place, parse_places
from penstock.settings import Settings

dead_letters = typer.Typer(no_args_is_help=True, help="Inspect, retry or drop dead letters.")

ConsumerArgument = Annotated[str, typer.Argument(help="Name of the consumer.")]
PLACE = "such as rides/2 offset 4118."
PlaceArgument = Annotated[list[str], typer.Argument(help=f"Place of the record, {PLACE}")]
PlacesArgument = Annotated[list[str] | None, typer.Argument(help=f"Places of the records, {PLACE}")]
AllOfThem = Annotated[bool, typer.Option("--all", help="All letters that the filters match.")]
LetterOptions = Annotated[
    LetterFilter,
    {"channel": None, "key": "KEY", "error": "CLASS", "since": "TIME", "until": "TIME"},
]


@subcommand(dead_letters, "list")
def list_(
    settings: Settings,
    *,
    consumer: Annotated[
        str | None, typer.Argument(help="Name of the consumer; by default all.")
    ] = None,
    letter_filter: LetterOptions,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of letters.")] = 50,
    after: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Continue after the last place of the previous page."),
    ] = None,
    by_reason: Annotated[
        bool, typer.Option("--by-reason", help="Count letters by error class.")
    ] = False,
    json: Json = False,
) -> None:
    """List the newest dead letters without their payloads, or count them by error class."""
    with open_connections(settings, "dead letters") as servers:
        if consumer is not None:
            _check_known(servers, consumer)
        chosen = replace(letter_filter, consumer=consumer)
        if by_reason:
            groups = letters.group(servers.store, chosen)
            show_found(groups, "consumer, channel, error, #letters, first at, last at", json=json)
            if sum(group.letters for group in groups) == letters.MAX_GROUPED:
                say(f"These are the newest {letters.MAX_GROUPED:,}; there may be more.")
            return
        if after is not None and consumer is None:
            raise InvalidSetting(
                "--after needs the name of the consumer: a place is one of its letters"
            )
        last = letters.find(servers.store, str(consumer), parse_place(after)) if after else None
        rows = letters.newest(servers.store, chosen, after=last, limit=limit)
    if not rows and not json:
        say("no dead letters")
        return
    columns = (
        "consumer, place, action, object, key, #attempts, parked, superseded by, failed at, reason"
    )
    show_found(rows, columns, json=json)
    if len(rows) == limit and consumer is not None and not json:
        say(f"There may be more: --after '{rows[-1].place}'")


@subcommand(dead_letters, "show")
def show_(
    settings: Settings, consumer: ConsumerArgument, place: PlaceArgument, json: Json = False
) -> None:
    """Show one dead letter, with its payload."""
    with open_connections(settings, "dead letters") as servers:
        _check_known(servers, consumer)
        letter = letters.find(servers.store, consumer, parse_place(" ".join(place)))
        record = letters.read_record(servers.store, letter)
    if record is None:
        raise Unknown(f"the dead letter at {letter.place} is gone")
    if json:
        show(with_payload({"letter": letter}, record))
        return
    show(
        f"{letter.consumer}  {letter.place}  record {letter.record_id}",
        f"{letter.action} {letter.object} {letter.key}, staged "
        f"{letter.staged_at:%Y-%m-%d %H:%M:%S}",
        f"{'parked' if letter.parked else 'failed ' + format_count(letter.attempts, 'time')}: "
        f"{letter.reason}",
        *([f"superseded by: {letter.superseded_by}"] if letter.superseded_by else []),
        *payload_lines(record),
    )


@subcommand(dead_letters, "retry", "master", "conf")
def retry(
    settings: Settings,
    *,
    consumer: ConsumerArgument,
    place: PlacesArgument = None,
    all_: AllOfThem = False,
    letter_filter: LetterOptions,
    parked: Annotated[bool, typer.Option("--parked")] = False,
    superseded: Annotated[bool, typer.Option("--superseded")] = False,
    plan: Annotated[bool, typer.Option("--plan")] = False,
    json: Json = False,
) -> None:
    """Retry dead letters in the order of the log. Jobs are staged again. Exits with 1 if a dead
    letter remains.

    Args:
        parked: With a place: also retry the records parked behind it. Without a place: retry all
            parked records.
        superseded: Also retry letters superseded by a later record of their key; the old effects
            then come last. Without a place: retry all superseded letters.
        plan: Only show which letters would be retried.
    """
    pipeline = require_pipeline(settings)
    pipeline.get_consumer(consumer)
    with open_connections(settings, "dead letters") as servers:
        chosen = _choose(
            servers,
            consumer,
            letter_filter,
            place or [],
            all_=all_,
            parked=parked,
            superseded=superseded,
        )
        if plan:
            show_found(
                chosen,
                "place, key, action, object, #attempts, parked, superseded by, reason",
                json=json,
            )
            return
        with open_frames(settings, pipeline.get_consumer(consumer)) as make_frame:
            outcomes = retry_letters(
                pipeline,
                chosen,
                servers.urls.database_url,
                superseded=superseded,
                prepare=settings.prepare,
                make_frame=make_frame,
            )
    show_found(outcomes, "place=letter.place, key=letter.key, outcome, reason", json=json)
    if superseded_count := sum(letter.outcome == "superseded" for letter in outcomes):
        say(
            f"{superseded_count:,} were not retried, because a later record of their keys was "
            "applied, or may have been: their effects would come last. For a handler that copies "
            f"rows, drop them: penstock dead-letters drop {consumer} --superseded --apply. If the "
            f"handler does not depend on order: penstock dead-letters retry {consumer} --superseded"
        )
    if any(letter.outcome in ("failed", "kept", "superseded") for letter in outcomes):
        raise typer.Exit(1)


@subcommand(dead_letters, "drop")
def drop(
    settings: Settings,
    *,
    consumer: ConsumerArgument,
    place: PlacesArgument = None,
    all_: AllOfThem = False,
    letter_filter: LetterOptions,
    superseded: Annotated[
        bool,
        typer.Option(
            "--superseded",
            help="Drop all letters superseded by a later applied record of their key.",
        ),
    ] = False,
    apply: Apply = False,
) -> None:
    """Drop dead letters: their records will never take effect."""
    with open_connections(settings, "dead letters") as servers:
        chosen = _choose(
            servers,
            consumer,
            letter_filter,
            place or [],
            all_=all_,
            parked=False,
            superseded=superseded,
        )
        for letter in chosen:
            show(
                f"{'dropped' if apply else 'would drop'} {letter.place}  {letter.action} "
                f"{letter.object} {letter.key}"
            )
        if apply:
            letters.drop(servers.store, chosen)
    if not apply and chosen:
        say(NOTHING_CHANGED)


def _choose(
    servers: Connections,
    consumer: str,
    letter_filter: LetterFilter,
    places: list[str],
    *,
    all_: bool,
    parked: bool,
    superseded: bool,
) -> list[DeadLetterRow]:
    """Returns the letters at some places, or all parked, superseded or other letters.

    With ``parked``, those parked behind the places are included.
    """
    _check_known(servers, consumer)
    rows = letters.of_consumer(servers.store, consumer, letter_filter)
    if all_:
        return rows
    if not (places or parked or superseded):
        raise InvalidSetting("which letters? Give a place such as rides/2 offset 4118, or --all")
    chosen_places = parse_places(" ".join(places)) if places else []
    chosen = [letters.at(rows, place) for place in chosen_places]
    chosen.sort(key=lambda row: (row.shard, row.offset), reverse=True)
    first = {(row.channel, row.key): (row.shard, row.offset) for row in chosen}

    def is_behind(letter: DeadLetterRow) -> bool:
        position = (letter.shard, letter.offset)  # newer shards have higher numbers
        return not chosen or first.get((letter.channel, letter.key), position) < position

    return [
        letter
        for letter in rows
        if letter in chosen
        or (parked and letter.parked and is_behind(letter))
        or (superseded and not chosen and letter.superseded_by)
    ]


def _check_known(servers: Connections, consumer: str) -> None:
    """Refuses an unknown name; a declared consumer may not be registered yet."""
    if servers.pipeline is None or consumer not in servers.pipeline.consumers:
        check_registered(servers.store, consumer)
