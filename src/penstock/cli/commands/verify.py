"""``penstock verify``: compares staged records, journal, log and checkpoints."""

from typing import Annotated, Any

import typer

from penstock.cli.command import Json, command, means_position, parse_position
from penstock.cli.engines import open_examiner
from penstock.cli.render import seconds, show, show_json, show_table
from penstock.cli.servers import open_connections
from penstock.settings import Settings
from penstock.verifying import Start, Verified
from penstock.verifying import verify as run

FINDINGS = 4
"""Exit code: something is lost, doubled, or in the wrong place."""

SHOWN = 50
"""Most findings shown as a table."""

SHOWN_AS_JSON = 1000
"""Most findings shown with ``--json``."""


@command("engine", "master", "conf")
def verify(
    settings: Settings,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="OFFSET|PLACE|TIME",
            help="Begin at this offset of each shard, or with the records sequenced since this time; by default at the beginning of the journal. "
            "A place, such as 'rides/2 offset 4118', begins there and compares its shard alone.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Prove that nothing is missing, doubled, changed or out of order, while everything runs; exits with 4 if something is."""
    with open_connections(settings, "verify") as servers, open_examiner(settings, servers) as examiner:
        done = run(
            servers.connection,
            servers.client,
            examiner,
            start=_parse_start(start),
            scope=servers.scope,
            declared=servers.pipeline.shard_names if servers.pipeline else (),
        )
    if json:
        show_json(_to_json(done))
    else:
        _show(done)
    if not done.clean:
        raise typer.Exit(FINDINGS)


def _parse_start(text: str | None) -> Start:
    """An offset or a place; anything else is a time, which Postgres parses."""
    return parse_position(text) if text is not None and means_position(text) else text


def _show(done: Verified) -> None:
    if done.findings:
        show_table(
            ("kind", "where", "shard", "#offset", "#offsets", "what"),
            [
                (each.kind, each.where, f"{each.channel}/{each.shard}", each.offset or None, each.count, each.text)
                for each in done.findings[:SHOWN]
            ],
        )
        if len(done.findings) > SHOWN:
            show(f"… and {len(done.findings) - SHOWN:,} more")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in done.counts.items())
    notes = [f"{done.unpublished:,} not published yet"] if done.unpublished else []
    if done.overtaken:
        notes.append(f"{done.overtaken:,} after a younger record of their key")
    show(
        f"{done.records:,} records of {done.shards} shards verified in {seconds(done.seconds)}: "
        + ("nothing missing, doubled, changed or out of order" if done.clean else kinds)
        + (f"; {', '.join(notes)}" if notes else "")
    )


def _to_json(done: Verified) -> dict[str, Any]:
    return {
        "clean": done.clean,
        "records": done.records,
        "shards": done.shards,
        "unpublished": done.unpublished,
        "overtaken": done.overtaken,
        "counts": {str(kind): count for kind, count in done.counts.items()},
        "findings": done.findings[:SHOWN_AS_JSON],
        "seconds": done.seconds,
    }
