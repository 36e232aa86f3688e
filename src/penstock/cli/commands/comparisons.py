"""``penstock verify`` and ``penstock reconcile``: compare the log, and consumers' state."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Annotated, Any

import typer

from penstock.cli.command import (
    DIFFERENCES,
    Json,
    command,
    means_position,
    parse_position,
    require_pipeline,
)
from penstock.cli.connecting import open_connections
from penstock.cli.engines import open_comparer, open_examiner
from penstock.cli.render import say, show, show_error, show_json, show_rows, show_table
from penstock.database.driver_errors import describe
from penstock.display import format_count, format_seconds
from penstock.errors import InvalidSetting, PenstockError
from penstock.journal.lineage import examine_lineage
from penstock.reconciling.comparison import Difference, StateComparison
from penstock.reconciling.reconciliation import (
    FailedRun,
    Intent,
    Reconciled,
    find_reconciliations,
    reconcile_all,
)
from penstock.settings import Settings, duration
from penstock.verifying.verification import Verified
from penstock.verifying.verification import verify as run_verification

MAX_FINDINGS, MAX_KEYS = 50, 20
"""Findings of ``verify``, and differing keys, shown as a table."""

MAX_JSON = 1000
"""Limit of both with ``--json``; ``--report`` writes all keys."""


@command("engine", "master", "conf")
def verify(
    settings: Settings,
    start: Annotated[str | None, typer.Option("--from", metavar="OFFSET|PLACE|TIME")] = None,
    json: Json = False,
) -> None:
    """Prove that no record is missing, doubled, changed or out of order, while everything runs.
    Exits with 4 if it finds such a record.

    Args:
        start: Begin at this offset of each shard, or with the records sequenced since this time; by
            default, with the oldest record of the journal. A place (rides/2 offset 4118) limits the
            check to its shard.
    """
    with (
        open_connections(settings, "verify") as servers,
        open_examiner(settings, servers) as examiner,
    ):
        # What is neither an offset nor a place is a time, which Postgres parses.
        begin = parse_position(start) if start is not None and means_position(start) else start
        declared = servers.pipeline.shard_names if servers.pipeline else ()
        verified = run_verification(
            servers.store, servers.client, examiner, start=begin, declared=declared
        )
    if json:
        names = (
            "clean",
            "records",
            "shards",
            "unpublished",
            "overtaken",
            "counts",
            "findings",
            "seconds",
        )
        facts = {name: getattr(verified, name) for name in names}
        counts = {str(kind): count for kind, count in verified.counts.items()}
        show_json({**facts, "counts": counts, "findings": verified.findings[:MAX_JSON]})
    else:
        _show_verified(verified)
    if not verified.clean:
        raise typer.Exit(DIFFERENCES)


def _show_verified(verified: Verified) -> None:
    if verified.findings:
        show_rows(
            verified.findings[:MAX_FINDINGS],
            "kind, where, shard, #offset, #offsets=count, what=text",
            shard=lambda finding: f"{finding.channel}/{finding.shard}",
            offset=lambda finding: finding.offset or None,
        )
        if len(verified.findings) > MAX_FINDINGS:
            show(f"… and {len(verified.findings) - MAX_FINDINGS:,} more")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in verified.counts.items())
    notes = [f"{verified.unpublished:,} not published yet"] if verified.unpublished else []
    if verified.overtaken:
        notes.append(f"{verified.overtaken:,} after a newer record of their key")
    show(
        f"{format_count(verified.records, 'record')} of {format_count(verified.shards, 'shard')} "
        f"verified in {format_seconds(verified.seconds)}: "
        + ("nothing missing, doubled, changed or out of order" if verified.clean else kinds)
        + (f"; {', '.join(notes)}" if notes else "")
    )


@command("engine", "master", "conf")
def reconcile(
    settings: Settings,
    names: Annotated[list[str] | None, typer.Argument()] = None,
    apply: Annotated[bool, typer.Option("--apply")] = False,
    whole_state: Annotated[bool, typer.Option("--whole")] = False,
    report: Annotated[str | None, typer.Option(metavar="DIR")] = None,
    values: Annotated[bool, typer.Option("--values")] = False,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    wait: Annotated[float, typer.Option(metavar="DURATION", parser=duration(zero=True))] = 60.0,
    json: Json = False,
) -> None:
    """Compare the state of running consumers with the canonical tables. Exits with 4 if differences
    remain.

    Args:
        names: Names of reconciliations; all by default.
        apply: Repair the differences. Without --apply, nothing changes.
        whole_state: With --apply: repair the consumer's whole state and move its position, in one
            transaction.
        report: Write every differing key to DIR: as CSV if DIR ends with .csv, otherwise as
            Parquet, which needs Spark.
        values: Also show and report the rows of both sides, with all values.
        resume: With --apply: continue the repairs of an interrupted run. If no run was interrupted,
            compare everything.
        wait: Maximum wait for a consumer to pause at the cut.
    """
    if whole_state and not apply:
        raise InvalidSetting("--whole replaces a state: it needs --apply")
    if resume and (whole_state or not apply):
        raise InvalidSetting("--resume continues repairs: it needs --apply, without --whole")
    pipeline = require_pipeline(settings)
    specs = [pipeline.get_reconciliation(n) for n in names or sorted(pipeline.reconciliations)]
    if not specs:
        raise InvalidSetting(
            "the pipeline declares no reconciliation: pipeline.reconciliation(of=…, state=…, key=…)"
        )
    groups = [[spec] for spec in specs]
    if whole_state:  # all tables of each consumer together: they share its position
        names_of_consumers = dict.fromkeys(spec.consumer.name for spec in specs)
        groups = [
            find_reconciliations(pipeline, consumer, specs) for consumer in names_of_consumers
        ]
    intent: Intent = "replace" if whole_state else "repair" if apply else "compare"
    runs: list[Reconciled | FailedRun] = []
    with (
        open_connections(settings, "reconcile") as servers,
        open_comparer(settings, servers, chain(*groups), report, with_rows=values) as comparer,
    ):
        examine_lineage(servers.store, servers.client)
        for run in reconcile_all(
            servers.connect,
            servers.store.scope,
            groups,
            comparer,
            intent=intent,
            wait_s=wait,
            resume=resume,
        ):
            runs.append(run)
            if isinstance(run, FailedRun):
                say(f"{run.name}: failed")
                show_error(run.error, debug=settings.log_level == "debug")
            elif not json:
                _show_reconciled(run, values=values)
    if json:
        show_json([_to_json(run) for run in runs])
    _exit(runs)


def _exit(runs: Sequence[Reconciled | FailedRun]) -> None:
    """Ends with the code of the first failure; otherwise by what differs."""
    for run in runs:
        if isinstance(run, FailedRun):
            raise typer.Exit(run.error.exit_code if isinstance(run.error, PenstockError) else 1)
    if not all(run.clean for run in runs if isinstance(run, Reconciled)):
        raise typer.Exit(DIFFERENCES)


def _show_reconciled(reconciled: Reconciled, *, values: bool) -> None:
    comparison = reconciled.comparison
    if comparison is None:
        say(
            f"{reconciled.name}: replaced the whole state of {reconciled.consumer} by "
            f"{format_count(reconciled.repaired, 'row')}"
        )
        return
    _show_differences(comparison, values=values)
    if reconciled.resumed is not None:
        say(
            f"{reconciled.name}: continued the repairs of run {reconciled.resumed}; nothing else "
            "was compared"
        )
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in comparison.counts.items())
    verdict = "equal" if comparison.equal else f"{comparison.total:,} differ ({kinds})"
    repaired = f", {reconciled.repaired:,} repaired" if reconciled.repaired else ""
    show(
        f"{reconciled.name}: {format_count(comparison.compared, 'key')} compared at tick "
        f"{reconciled.tick}, {verdict}{repaired}; "
        f"{reconciled.consumer} was paused for "
        f"{max(reconciled.paused_s, reconciled.held_s) * 1000:.0f} ms"
    )


def _show_differences(comparison: StateComparison, *, values: bool) -> None:
    if not comparison.differences:
        return
    show_table(
        ("kind", "key", "columns", *(("expected", "found") if values else ())),
        [
            (
                d.kind,
                d.key,
                ", ".join(d.columns) or None,
                *((d.expected, d.found) if values else ()),
            )
            for d in comparison.differences[:MAX_KEYS]
        ],
    )
    if comparison.total > MAX_KEYS:
        show(f"… and {comparison.total - MAX_KEYS:,} more")
    if comparison.by_column:
        show_table(("column", "#differs in"), comparison.by_column.items())


def _to_json(run: Reconciled | FailedRun) -> dict[str, Any]:
    if isinstance(run, FailedRun):
        return {"name": run.name, "clean": False, "error": describe(run.error)}
    facts = {
        field.name: getattr(run, field.name) for field in fields(run) if field.name != "comparison"
    }
    compared = run.comparison
    return {
        **facts,
        "clean": run.clean,
        "compared": compared and compared.compared,
        "equal": compared and compared.equal,
        "differences": {str(kind): count for kind, count in compared.counts.items()}
        if compared
        else {},
        "columns": dict(compared.by_column) if compared else {},
        "keys": [
            _difference_to_json(difference)
            for difference in (compared.differences[:MAX_JSON] if compared else ())
        ],
    }


def _difference_to_json(difference: Difference) -> dict[str, Any]:
    """Returns the difference, with its rows only if they were asked for."""
    facts = {"key": difference.key, "kind": str(difference.kind), "columns": difference.columns}
    rows = {"expected": difference.expected, "found": difference.found}
    return facts | rows if any(rows.values()) else facts
