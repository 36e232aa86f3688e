"""``penstock verify``: staged records, journal, log and checkpoints against one another."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.connections import connected
from penstock.cli.render import seconds, show, show_json, show_table
from penstock.cli.spark import spark_of
from penstock.cli.verbs import Json, verb
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.verifying import Start, Verified

FAULTS = 4
"""Exit code: something is lost, doubled, or in the wrong place."""

SHOWN = 50
"""Most findings that are shown; ``--json`` has a thousand."""

TOLD = 1000


@verb("master", "conf")
def verify(
    settings: Settings,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="OFFSET|TIME",
            help="Begin at this offset of each shard, or at what was sequenced since a time; by default where the journal begins.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Prove that nothing is missing, doubled, changed or out of order, while everything runs; ends with 4 if something is."""
    from penstock.verifying import verify as run  # noqa: PLC0415  not for `--help`

    with connected(settings, "verify") as servers, spark_of(settings, "verifying") as spark:
        from penstock.spark.reconcile.verify import SparkExaminer  # noqa: PLC0415  not for `--help`

        urls, schema, namespace = servers.servers, servers.schema, servers.namespace
        done = run(
            servers.connection,
            servers.client,
            SparkExaminer(spark, urls.database_url, urls.redis_url, schema, namespace),
            start=_start(start),
            schema=schema,
            namespace=namespace,
            declared=servers.pipeline.shard_names if servers.pipeline else (),
        )
    if json:
        show_json(_object(done))
    else:
        _show(done)
    if not done.clean:
        raise typer.Exit(FAULTS)


def _start(text: str | None) -> "Start":
    from penstock.records import Offset  # noqa: PLC0415  not for `--help`

    return Offset(int(text)) if text is not None and text.isascii() and text.isdigit() else text


def _show(done: "Verified") -> None:
    if done.found:
        show_table(
            ("fault", "where", "shard", "#offset", "#offsets", "what"),
            [
                (
                    each.fault,
                    each.where,
                    f"{each.channel}/{each.shard}",
                    each.offset or None,
                    each.count,
                    each.text,
                )
                for each in done.found[:SHOWN]
            ],
        )
        if len(done.found) > SHOWN:
            show(f"… and {len(done.found) - SHOWN:,} more")
    kinds = ", ".join(f"{count:,} {fault}" for fault, count in done.counts.items())
    notes = [f"{done.unpublished:,} not published yet"] if done.unpublished else []
    if done.overtaken:
        notes.append(f"{done.overtaken:,} after a younger record of their key")
    show(
        f"{done.records:,} records of {done.shards} shards verified in {seconds(done.seconds)}: "
        + ("nothing missing, doubled, changed or out of order" if done.clean else kinds)
        + (f"; {', '.join(notes)}" if notes else "")
    )


def _object(done: "Verified") -> dict[str, Any]:
    return {
        "clean": done.clean,
        "records": done.records,
        "shards": done.shards,
        "unpublished": done.unpublished,
        "overtaken": done.overtaken,
        "faults": {str(fault): count for fault, count in done.counts.items()},
        "found": done.found[:TOLD],
        "seconds": done.seconds,
    }
