"""``penstock reset``: a checkpoint by hand, a new epoch, an Ick that is whole again."""

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.connections import connected
from penstock.cli.render import say, show, show_json, show_table
from penstock.cli.verbs import Json, Yes, verb
from penstock.errors import InvalidSetting
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.operating.reset import EpochPlan, Target

reset = typer.Typer(no_args_is_help=True)


@reset.command("checkpoint")
@verb()
def checkpoint(  # noqa: PLR0917  options
    settings: Settings,
    consumer: Annotated[str, typer.Argument(help="Name of the consumer.")],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="OFFSET|earliest|latest",
            help="The last offset that counts as applied, or an end of the journal.",
        ),
    ] = None,
    shard: Annotated[int | None, typer.Option(min=0, help="Only this shard.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Let halted shards go on.")] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Move a consumer's checkpoint, or let its halted shards go on."""
    from penstock.operating.reset import reset_checkpoint  # noqa: PLC0415  not for `--help`

    if to is None and not resume:
        raise InvalidSetting(
            "what is to be reset? Give --to OFFSET, --to earliest, --to latest, or --resume"
        )
    with connected(settings, "reset") as servers:
        moves = reset_checkpoint(
            servers.connection,
            consumer,
            _target(to),
            shard=shard,
            resume=resume,
            apply=yes,
            schema=servers.schema,
        )
    if json:
        show_json(moves)
    else:
        show_table(
            (
                "consumer",
                "shard",
                "#from",
                "#to",
                "#applied again",
                "#passed over",
                "#dead letters removed",
                "resumes",
            ),
            (
                (
                    m.consumer,
                    f"{m.channel}/{m.shard}",
                    m.before,
                    m.after,
                    m.again,
                    m.passed_over,
                    m.dead_letters,
                    m.resumes,
                )
                for m in moves
            ),
        )
    if any(move.again for move in moves):
        say("Records that are applied again take effect again: exactly once is yours to see to.")
    if not moves:
        say("There is nothing to do.")
    elif not yes:
        say("Nothing was changed. To carry it out: --yes")


def _target(to: str | None) -> "Target":
    from penstock.records import Offset  # noqa: PLC0415  not for `--help`

    match to:
        case None | "earliest" | "latest":
            return to
        case _:
            pass
    if not to.isdigit():
        raise InvalidSetting(f"--to {to}: give an offset, or one of earliest, latest")
    return Offset(int(to))


@reset.command("epoch")
@verb()
def epoch(settings: Settings, yes: Yes = False, json: Json = False) -> None:
    """Decide after HistoryDiverged that Postgres is right: open a new epoch, and have the log replayed."""
    from penstock.operating.reset import reset_epoch  # noqa: PLC0415  not for `--help`

    with connected(settings, "reset") as servers:
        plan = reset_epoch(
            servers.connection,
            servers.client,
            servers.pipeline,
            apply=yes,
            schema=servers.schema,
            namespace=servers.namespace,
        )
    if json:
        show_json(plan)
    else:
        show(_text(plan))
    if plan.reason is not None and not yes:
        say("Nothing was changed. Stop streamers and consumers, then carry it out: --yes")


@reset.command("ick")
@verb()
def ick(
    settings: Settings,
    channel: Annotated[str, typer.Argument(help="Name of the Ick.")],
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Make a damaged Ick whole: what does not belong is moved aside, what may have been lost is told again."""
    from penstock.operating.reset import reset_ick  # noqa: PLC0415  not for `--help`

    with connected(settings, "reset") as servers:
        mended = reset_ick(
            servers.connection,
            servers.client,
            channel,
            servers.pipeline,
            apply=yes,
            schema=servers.schema,
            namespace=servers.namespace,
        )
    if json:
        show_json(mended)
    else:
        show_table(
            ("shard", "key", "found", "moved to", "told again"),
            ((str(m.shard), m.key, m.found, m.moved_to, m.told_again) for m in mended),
        )
    if not mended:
        say("It is whole: there is nothing to do.")
    elif not yes:
        say("Nothing was changed. To carry it out: --yes")


def _text(plan: "EpochPlan") -> str:
    if plan.reason is None:
        return f"The past is as it is remembered, in epoch {plan.epoch}: there is nothing to do."
    unsequenced = plan.unsequenced or {}
    lines = [
        f"because: {plan.reason}",
        f"{'opened' if plan.applied else 'to open'}: epoch {plan.following}, after {plan.epoch}",
        f"records with transaction ids of another cluster: {plan.marked:,}",
        f"records without an offset, which get theirs at the end of their shards: {sum(unsequenced.values()):,}"
        + "".join(f"\n    {shard}: {count:,}" for shard, count in unsequenced.items()),
        f"checkpoints beyond the journal, which go back to its end: {len(plan.rewound)}"
        + "".join(
            f"\n    {each.consumer} {each.shard}: {each.offset} → {each.journal}. It has applied records that Postgres has lost: "
            "compare its tables"
            for each in plan.rewound
        ),
        f"streams that are deleted in Redis, and replayed from the journal: {len(plan.deleted)}"
        + "".join(
            f"\n    {each.shard}: the log ends at {each.log}, the journal at {each.journal} ({each.why})"
            for each in plan.deleted
        ),
    ]
    if plan.gone:
        lines.append(
            f"warning: {plan.gone:,} records that the journal names are gone from Postgres, and cannot be replayed: "
            "see penstock doctor"
        )
    return "\n".join(lines)
