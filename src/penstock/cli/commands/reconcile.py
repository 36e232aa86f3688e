"""``penstock reconcile``: compares what consumers hold with the canonical tables."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import typer

from penstock.cli.command import Json, command, require_pipeline
from penstock.cli.connections import open_connections
from penstock.cli.engines import open_comparer
from penstock.cli.render import say, show, show_json, show_table
from penstock.declarations import ReconciliationSpec
from penstock.errors import InvalidSetting
from penstock.journal import examine_lineage
from penstock.pipeline import Pipeline
from penstock.reconciling import (
    Intent,
    Reconciled,
    StateComparison,
    find_reconciliations,
)
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
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of reconciliations; all by default.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Repair what differs; without it, nothing changes.")
    ] = False,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="With --apply: replace the consumer's whole state, and its position."
        ),
    ] = False,
    report: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write every difference: CSV if it ends with .csv, otherwise Parquet, on Spark.",
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0, metavar="S", help="How long to wait for a consumer to reach the cut, in seconds."
        ),
    ] = 60.0,
    json: Json = False,
) -> None:
    """Compare what consumers hold with the canonical tables, exactly, while they run; exits with 4 if anything differs."""
    if whole and not apply:
        raise InvalidSetting("--whole replaces a state: it needs --apply")
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
        open_comparer(settings, servers, chain(*groups), report) as comparer,
    ):
        examine_lineage(servers.connection, servers.client, servers.scope)
        for spec, *others in groups:
            found = run(
                servers.connect,
                servers.scope,
                spec,
                comparer,
                intent=intent,
                wait_s=wait,
                others=others,
            )
            done.append(found)
            if not json:
                _show(found)
    if json:
        show_json([_to_json(found) for found in done])
    if not all(found.clean for found in done):
        raise typer.Exit(DIFFERENCES)


def _group_by_consumer(
    pipeline: Pipeline, specs: Sequence[ReconciliationSpec]
) -> list[list[ReconciliationSpec]]:
    """All tables of each consumer together: they share its position."""
    consumers = dict.fromkeys(spec.consumer.name for spec in specs)
    return [find_reconciliations(pipeline, consumer, specs) for consumer in consumers]


def _show(found: Reconciled) -> None:
    comparison = found.comparison
    if comparison is None:
        say(
            f"{found.name}: replaced the whole state of {found.consumer} by {found.repaired:,} rows"
        )
        return
    _show_differences(comparison)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in comparison.counts.items())
    verdict = "equal" if comparison.equal else f"{comparison.total:,} differ ({kinds})"
    repaired = f", {found.repaired:,} repaired" if found.repaired else ""
    show(
        f"{found.name}: {comparison.compared:,} keys compared at tick {found.tick}, {verdict}{repaired}; "
        f"{found.consumer} was paused for {max(found.paused_s, found.held_s) * 1000:.0f} ms"
    )


def _show_differences(comparison: StateComparison) -> None:
    if comparison.differences:
        show_table(
            ("kind", "key", "expected", "found"),
            [(d.kind, d.key, d.expected, d.found) for d in comparison.differences[:SHOWN]],
        )
    if comparison.differences and comparison.total > SHOWN:
        show(f"… and {comparison.total - SHOWN:,} more")


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
        "keys": [
            {"key": d.key, "kind": str(d.kind), "expected": d.expected, "found": d.found}
            for d in (comparison.differences[:SHOWN_AS_JSON] if comparison else ())
        ],
        "repaired": found.repaired,
        "clean": found.clean,
        "paused_s": found.paused_s,
        "held_s": found.held_s,
        "seconds": found.seconds,
    }
