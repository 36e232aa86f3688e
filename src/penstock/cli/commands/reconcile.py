"""``penstock reconcile``: what consumers hold against the canonical tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.connections import Connected, connected
from penstock.cli.render import say, show, show_json, show_table
from penstock.cli.spark import spark_of
from penstock.cli.verbs import Json, pipeline_of, verb
from penstock.errors import InvalidSetting
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.declarations import ReconciliationSpec
    from penstock.pipeline import Pipeline
    from penstock.reconciling import Connect, Reconciled
    from penstock.spark.reconcile import SparkComparer

DIFFERENCES = 4
"""Exit code: something differs, and was not mended."""

SHOWN = 20
"""Most differing keys that are shown; ``--report`` and ``--json`` have more."""


@verb("master", "conf")
def reconcile(  # noqa: PLR0917  options
    settings: Settings,
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of reconciliations; all of them by default.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Put right what differs; without it, nothing changes.")
    ] = False,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="With --apply: replace all that the consumer keeps, and its position."
        ),
    ] = False,
    report: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Write every difference: Parquet, or CSV if it ends with .csv."
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0, metavar="S", help="How long to wait for a consumer to come to the cut."
        ),
    ] = 60.0,
    json: Json = False,
) -> None:
    """Compare what consumers hold with the canonical tables, exactly, while they run; ends with 4 if anything differs."""
    from penstock.journal import examine_lineage  # noqa: PLC0415  not for `--help`
    from penstock.reconciling import reconcile as run  # noqa: PLC0415  the same

    if whole and not apply:
        raise InvalidSetting("--whole replaces a state: it goes with --apply")
    pipeline = pipeline_of(settings)
    specs = [pipeline.get_reconciliation(n) for n in names or sorted(pipeline.reconciliations)]
    if not specs:
        raise InvalidSetting(
            "the pipeline declares no reconciliation: see pipeline.reconciliation(of=…, state=…, key=…)"
        )
    parts = _whole(pipeline, specs) if whole else [[spec] for spec in specs]
    done: list[Reconciled] = []
    with (
        connected(settings, "reconcile") as servers,
        comparing(settings, servers, report) as comparer,
    ):
        examine_lineage(
            servers.connection, servers.client, schema=servers.schema, namespace=servers.namespace
        )
        for spec, *others in parts:
            found = run(
                connect_of(servers),
                spec,
                comparer,
                intent="replace" if whole else "mend" if apply else "compare",
                schema=servers.schema,
                wait_s=wait,
                others=others,
            )
            done.append(found)
            if not json:
                _show(found)
    if json:
        show_json([_object(found) for found in done])
    if not all(found.clean for found in done):
        raise typer.Exit(DIFFERENCES)


def _whole(
    pipeline: "Pipeline", specs: Sequence["ReconciliationSpec"]
) -> list[list["ReconciliationSpec"]]:
    """For each consumer of some reconciliations all the tables that it keeps: they have one position."""
    consumers = dict.fromkeys(spec.consumer.name for spec in specs)
    return [pipeline.find_reconciliations(consumer, specs) for consumer in consumers]


@contextmanager
def comparing(
    settings: Settings, servers: Connected, report: str | None = None
) -> Iterator["SparkComparer"]:
    """A Spark session that compares, as long as it is needed.

    Raises:
        InvalidSetting: Spark is not installed.
        JavaMissing: No Java runtime.
    """
    with spark_of(settings, "reconciling") as spark:
        from penstock.spark.reconcile import SparkComparer  # noqa: PLC0415  not for `--help`

        yield SparkComparer(spark, servers.servers.database_url, report)


def connect_of(servers: Connected) -> "Connect":
    """Opens connections to the command's Postgres."""
    from penstock.database.connections import connect_postgres  # noqa: PLC0415  not for `--help`

    return lambda: connect_postgres(
        servers.servers.database_url, application="reconcile", prepare=False
    )


def _show(found: "Reconciled") -> None:
    comparison = found.comparison
    if comparison is None:
        say(
            f"{found.name}: {found.repaired:,} rows, in the place of all that {found.consumer} held"
        )
        return
    if comparison.differences:
        show_table(
            ("kind", "key", "expected", "found"),
            [(d.kind, d.key, d.expected, d.found) for d in comparison.differences[:SHOWN]],
        )
        if comparison.total > SHOWN:
            show(f"… and {comparison.total - SHOWN:,} more")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in comparison.counts.items())
    verdict = "equal" if comparison.equal else f"{comparison.total:,} differ ({kinds})"
    mended = f", {found.repaired:,} mended" if found.repaired else ""
    show(
        f"{found.name}: {comparison.compared:,} keys compared at tick {found.tick}, {verdict}{mended}; "
        f"{found.consumer} stood still for {max(found.paused_s, found.held_s) * 1000:.0f} ms"
    )


def _object(found: "Reconciled") -> dict[str, Any]:
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
            for d in (comparison.differences[:1000] if comparison else ())
        ],
        "repaired": found.repaired,
        "clean": found.clean,
        "paused_s": found.paused_s,
        "held_s": found.held_s,
        "seconds": found.seconds,
    }
