"""``penstock dead-letters``: records that consumers have set aside."""

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.connections import Connected, connected
from penstock.cli.render import say, show, show_json, show_table
from penstock.cli.verbs import Json, Yes, pipeline_of, verb
from penstock.errors import InvalidSetting
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.operating.dead_letters import DeadLetter

dead_letters = typer.Typer(no_args_is_help=True)

Consumer = Annotated[str, typer.Argument(help="Name of the consumer.")]
Place = Annotated[str, typer.Argument(help="Where the record stands: rides/2/4118, or 2/4118.")]
Places = Annotated[
    list[str] | None, typer.Argument(help="Where the records stand: rides/2/4118, or 2/4118.")
]


@dead_letters.command("list")
@verb()
def list_(
    settings: Settings,
    consumer: Annotated[
        str | None, typer.Argument(help="Name of the consumer; by default all.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most letters.")] = 50,
    json: Json = False,
) -> None:
    """List the newest, without their payloads."""
    from penstock.operating.dead_letters import newest  # noqa: PLC0415  not for `--help`

    with connected(settings, "dead letters") as servers:
        found = newest(servers.connection, consumer, limit=limit, schema=servers.schema)
    if json:
        show_json(found)
        return
    if not found:
        say("no dead letters")
        return
    show_table(
        (
            "consumer",
            "place",
            "action",
            "object",
            "key",
            "#attempts",
            "parked",
            "failed at",
            "reason",
        ),
        (
            (
                each.consumer,
                each.place,
                each.action,
                each.object,
                each.key,
                each.attempts,
                each.parked,
                each.failed_at,
                each.reason,
            )
            for each in found
        ),
    )


@dead_letters.command("show")
@verb()
def show_(settings: Settings, consumer: Consumer, place: Place, json: Json = False) -> None:
    """Show one, with its payload."""
    from penstock.errors import Unknown  # noqa: PLC0415  not for `--help`
    from penstock.operating.dead_letters import at, of_consumer, record_of  # noqa: PLC0415  the same

    with connected(settings, "dead letters") as servers:
        letter = at(of_consumer(servers.connection, consumer, schema=servers.schema), place)
        record = record_of(servers.connection, letter, schema=servers.schema)
    if record is None:
        raise Unknown(f"the dead letter at {place} is gone")
    if json:
        show_json({"letter": letter, "data": record.data, "headers": record.headers or None})
        return
    show(f"{letter.consumer}  {letter.place}  record {letter.record_id}")
    show(
        f"{letter.action} {letter.object} {letter.key}, staged {letter.staged_at:%Y-%m-%d %H:%M:%S}"
    )
    show(f"{'parked' if letter.parked else f'failed {letter.attempts} times'}: {letter.reason}")
    show(jsonlib.dumps(record.data, indent=2, ensure_ascii=False))
    if record.headers:
        show(f"headers: {record.headers_json}")


@dead_letters.command("retry")
@verb()
def retry(
    settings: Settings,
    consumer: Consumer,
    place: Places = None,
    all_: Annotated[bool, typer.Option("--all", help="All of the consumer's.")] = False,
    parked: Annotated[
        bool,
        typer.Option(
            "--parked",
            help="With a place: also those that are parked behind it. Alone: all that are parked.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Try some again, in the order of the log; ends with 1 if one fails again."""
    from penstock.operating.dead_letters import retry as try_again  # noqa: PLC0415  not for `--help`

    pipeline = pipeline_of(settings)
    pipeline.get_consumer(consumer)
    with connected(settings, "dead letters") as servers:
        letters = _chosen(servers, consumer, place or [], all_=all_, parked=parked)
        done = try_again(pipeline, letters, servers.servers.database_url, prepare=settings.prepare)
    if json:
        show_json(done)
    else:
        show_table(
            ("place", "key", "outcome", "reason"),
            ((each.letter.place, each.letter.key, each.outcome, each.reason) for each in done),
        )
    if any(each.outcome in ("failed", "kept") for each in done):
        raise typer.Exit(1)


@dead_letters.command("drop")
@verb()
def drop(
    settings: Settings,
    consumer: Consumer,
    place: Places = None,
    all_: Annotated[bool, typer.Option("--all", help="All of the consumer's.")] = False,
    yes: Yes = False,
) -> None:
    """Give some up for ever: their records will have had no effect."""
    from penstock.operating.dead_letters import drop as give_up  # noqa: PLC0415  not for `--help`

    with connected(settings, "dead letters") as servers:
        letters = _chosen(servers, consumer, place or [], all_=all_, parked=False)
        for letter in letters:
            show(
                f"{'dropped' if yes else 'would drop'} {letter.place}  {letter.action} {letter.object} {letter.key}"
            )
        if yes:
            give_up(servers.connection, letters, schema=servers.schema)
    if not yes and letters:
        say("Nothing was changed. To carry it out: --yes")


def _chosen(
    servers: Connected, consumer: str, places: list[str], *, all_: bool, parked: bool
) -> "list[DeadLetter]":
    from penstock.operating.dead_letters import at, of_consumer  # noqa: PLC0415  not for `--help`

    letters = of_consumer(servers.connection, consumer, schema=servers.schema)
    if all_:
        return letters
    if not places and not parked:
        raise InvalidSetting("which? Give a place such as rides/2/4118, or --all")
    named = [at(letters, place) for place in places]
    keys = {(letter.channel, letter.shard, letter.key): letter.offset for letter in named}
    return [
        letter
        for letter in letters
        if letter in named
        or (
            parked
            and letter.parked
            and (
                not named
                or keys.get((letter.channel, letter.shard, letter.key), letter.offset)
                < letter.offset
            )
        )
    ]
