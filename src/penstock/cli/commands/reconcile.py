"""``penstock reconcile``: compares what consumers hold with the canonical tables."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import typer

from penstock.cli.command import Json, command, require_pipeline
from penstock.cli.engines import open_comparer
from penstock.cli.render import say, show, show_json, show_table
from penstock.cli.servers import open_connections
from penstock.declaring.declarations import ReconciliationSpec
from penstock.errors import InvalidSetting
from penstock.journal import examine_lineage
from penstock.pipeline import Pipeline
from penstock.reconciling import Difference, Intent, Reconciled, StateComparison, find_reconciliations
from penstock.reconciling import reconcile as run
from penstock.settings import Settings

DIFFERENCES = 4
"""Exit code: something differs and was not repaired."""

SHOWN = 20
"""Most differing keys shown as a table."""

SHOWN_AS_JSON = 1000
"""Most differing keys shown with ``--json``; ``--report`` writes all."""


@command("engine", "master", "conf")
def reconcile(  # noqa: PLR0917  options
    settings: Settings,
    names: Annotated[list[str] | None, typer.Argument(help="Names of reconciliations; all by default.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Repair what differs; without it, nothing changes.")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="With --apply: replace the consumer's whole state, and its position.")
    ] = False,
    report: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Write every differing key: CSV if it ends with .csv, otherwise Parquet, on Spark."
        ),
    ] = None,
    values: Annotated[
        bool,
        typer.Option(
            "--values",
            help="Show the rows of both sides as well, and write them into the report: all of their values, whatever they are.",
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="With --apply: go on with the repairs of the last run, if it was interrupted; otherwise compare everything.",
        ),
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, metavar="S", help="How long to wait for a consumer to reach the cut, in seconds.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """Compare what consumers hold with the canonical tables, exactly, while they run; exits with 4 if anything differs."""
    if whole and not apply:
        raise InvalidSetting("--whole replaces a state: it needs --apply")
    if resume and (whole or not apply):
        raise InvalidSetting("--resume goes on with repairs: it needs --apply, without --whole")
    pipeline = require_pipeline(settings)
    specs = [pipeline.get_reconciliation(n) for n in names or sorted(pipeline.reconciliations)]
    if not specs:
        raise InvalidSetting(
            "the pipeline declares no reconciliation: see pipeline.reconciliation(of=…, state=…, key=…)"
        )
    groups = _group_by_consumer(pipeline, specs) if whole else [[spec] for spec in specs]
    intent: Intent = "replace" if whole else "repair" if apply else "compare"
    done: list[Reconciled] = []
    with (
        open_connections(settings, "reconcile") as servers,
        open_comparer(settings, servers, chain(*groups), report, with_rows=values) as comparer,
    ):
        examine_lineage(servers.connection, servers.client, servers.scope)
        for spec, *others in groups:
            found = run(
                servers.connect, servers.scope, spec, comparer, intent=intent, wait_s=wait, others=others, resume=resume
            )
            done.append(found)
            if not json:
                _show(found, values=values)
    if json:
        show_json([_to_json(found) for found in done])
    if not all(found.clean for found in done):
        raise typer.Exit(DIFFERENCES)


def _group_by_consumer(pipeline: Pipeline, specs: Sequence[ReconciliationSpec]) -> list[list[ReconciliationSpec]]:
    """All tables of each consumer together: they share its position."""
    consumers = dict.fromkeys(spec.consumer.name for spec in specs)
    return [find_reconciliations(pipeline, consumer, specs) for consumer in consumers]


def _show(found: Reconciled, *, values: bool) -> None:
    comparison = found.comparison
    if comparison is None:
        say(f"{found.name}: replaced the whole state of {found.consumer} by {found.repaired:,} rows")
        return
    _show_differences(comparison, values=values)
    if found.resumed is not None:
        say(f"{found.name}: went on with the repairs of run {found.resumed}; nothing else was compared")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in comparison.counts.items())
    verdict = "equal" if comparison.equal else f"{comparison.total:,} differ ({kinds})"
    repaired = f", {found.repaired:,} repaired" if found.repaired else ""
    show(
        f"{found.name}: {comparison.compared:,} keys compared at tick {found.tick}, {verdict}{repaired}; "
        f"{found.consumer} was paused for {max(found.paused_s, found.held_s) * 1000:.0f} ms"
    )


def _show_differences(comparison: StateComparison, *, values: bool) -> None:
    if not comparison.differences:
        return
    show_table(
        ("kind", "key", "columns", *(("expected", "found") if values else ())),
        [
            (d.kind, d.key, ", ".join(d.columns) or None, *((d.expected, d.found) if values else ()))
            for d in comparison.differences[:SHOWN]
        ],
    )
    if comparison.total > SHOWN:
        show(f"… and {comparison.total - SHOWN:,} more")
    if comparison.by_column:
        show_table(("column", "#differs in"), comparison.by_column.items())


def _to_json(found: Reconciled) -> dict[str, Any]:
    comparison = found.comparison
    return {
        "run": found.run,
        "name": found.name,
        "consumer": found.consumer,
        "intent": found.intent,
        "tick": found.tick,
        "compared": comparison.compared if comparison else None,
        "equal": comparison.equal if comparison else None,
        "differences": {str(k): n for k, n in comparison.counts.items()} if comparison else {},
        "columns": dict(comparison.by_column) if comparison else {},
        "keys": [_difference_to_json(d) for d in (comparison.differences[:SHOWN_AS_JSON] if comparison else ())],
        "resumed": found.resumed,
        "repaired": found.repaired,
        "clean": found.clean,
        "paused_s": found.paused_s,
        "held_s": found.held_s,
        "seconds": found.seconds,
    }


def _difference_to_json(difference: Difference) -> dict[str, Any]:
    """Its rows only if there are any: they were asked for."""
    rows = {"expected": difference.expected, "found": difference.found}
    return {
        "key": difference.key,
        "kind": str(difference.kind),
        "columns": difference.columns,
        **(rows if any(rows.values()) else {}),
    }
