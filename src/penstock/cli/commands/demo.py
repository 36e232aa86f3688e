"""``penstock demo``: Rocket Rides, with crashes, double sends and a kill, and an account at the end."""

import sys
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.render import say, show, show_json, table_text
from penstock.cli.servers import servers
from penstock.cli.signals import INTERRUPTED, Stop
from penstock.cli.verbs import Json, from_extra, verb
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.demo.run import Progress
    from penstock.demo.verdict import Copy

DIFFERENCES = 4
"""Exit code: something was lost, doubled, or unequal."""

SAY_EVERY_S = 2.0


@verb("engine")
def demo(
    settings: Settings,
    seconds: Annotated[
        float, typer.Option(min=1, metavar="N", help="How long clients make traffic, at least.")
    ] = 30,
    reconcile: Annotated[
        bool,
        typer.Option(
            "--reconcile/--no-reconcile",
            help="Plant drift and mend it, and let a consumer begin with the tables: on Spark, whatever the engine.",
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Show the pipeline at work under crashes, double sends and a kill; ends with 4 if anything is lost or doubled."""
    with from_extra("demo", "the demo"):
        from penstock.demo.rides import pipeline  # noqa: PLC0415  not for `--help`
        from penstock.demo.run import Demo  # noqa: PLC0415  the same

    stop = Stop()
    with servers(settings, schema=pipeline.schema) as urls:
        screen = _Screen(quiet=as_json)
        say(
            f"Rocket Rides on the {settings.engine} engine: {seconds:g} s of traffic, once it runs"
            + (", and more if the reconciliation takes longer." if reconcile else ".")
        )
        run = Demo(
            settings.engine,
            seconds,
            urls.database_url,
            urls.redis_url,
            stop,
            screen.show,
            reconcile=reconcile,
        )
        try:
            progress = run.run()
        except KeyboardInterrupt:
            screen.close()
            say("stopped early, so there is no account; nothing of it is left running")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            screen.close()
    if as_json:
        show_json(_object(progress))
    else:
        show(_table(progress))
        show(_verdict(progress))
    if not progress.equal:
        raise typer.Exit(DIFFERENCES)


class _Screen:
    """A live table on a terminal, a line now and then elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._live: Any = None
        self._next = 0.0
        if sys.stderr.isatty() and not quiet:
            from rich.console import Console  # noqa: PLC0415  only a terminal needs it
            from rich.live import Live  # noqa: PLC0415  the same

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()

    def show(self, progress: "Progress") -> None:
        if self._live is not None:
            from rich.text import Text  # noqa: PLC0415  the same

            self._live.update(Text.from_ansi(_table(progress)), refresh=True)
        elif monotonic() >= self._next:
            self._next = monotonic() + SAY_EVERY_S
            say(_line(progress))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _line(progress: "Progress") -> str:
    now = progress.account
    counts = {name: consumer["applied"] for name, consumer in now.consumers.items()}
    counts["ride-index"] = now.index.applied
    if now.newcomer.position:
        counts["ride-newcomer"] = now.newcomer.applied
    drift = f", drift mended {progress.drift.mended}" if progress.drift else ""
    applied = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return (
        f"{progress.seconds:5.1f} s  {progress.phase}: staged {now.staged:,}, published {now.published:,}, "
        f"applied {applied}; crashes {now.crashes}, kills {progress.kills}, resent {now.resent}{drift}"
    )


def _table(progress: "Progress") -> str:
    now = progress.account
    rows = [
        (
            name,
            f"{c['applied']:,}",
            f"{c['skipped']:,}",
            f"{now.staged - c['position']:,}",
            _money(c["total_cents"]),
        )
        for name, c in now.consumers.items()
    ]
    rows.append(_copy_row("ride-index", now.index))
    if now.newcomer.position:
        rows.append(_copy_row("ride-newcomer", now.newcomer))
    rows.append(("canonical", f"{now.staged:,}", "", "", _money(now.canonical_cents)))
    head = (
        f"{progress.phase}, {progress.seconds:.0f} s, {progress.engine}: staged {now.staged:,}, "
        f"sequenced {now.sequenced:,}, published {now.published:,}\n"
        f"rolled back {progress.rolled_back:,}, tried again {progress.retried:,}, crashes {now.crashes}, "
        f"kills {progress.kills}, batches sent again {now.resent}\n"
        f"stage to handler p50 {now.p50_ms:.1f} ms, p99 {now.p99_ms:.0f} ms\n\n"
    )
    return head + table_text(["consumer", "#applied", "#skipped", "#lag", "#total"], rows)


def _copy_row(name: str, copy: "Copy") -> tuple[str, str, str, str, str]:
    lag = f"{copy.told - copy.position:,}"
    return name, f"{copy.applied:,}", "", lag, _money(copy.total_cents)


def _verdict(progress: "Progress") -> str:
    now, drift = progress.account, progress.drift
    mended = (
        f"drift: {drift.planted} rows planted, {drift.found} found, {drift.mended} mended"
        f"{', under traffic' if progress.under_traffic else ''}\n"
        f"newcomer: began with the tables, {now.newcomer.different} rows different from them"
        if drift
        else ""
    )
    return (
        f"{'equal' if progress.equal else 'NOT EQUAL'}: {now.staged:,} records, {len(now.consumers)} consumers, "
        f"lost {now.lost}, doubled {now.doubled}, out of order {now.out_of_order}\n"
        f"index: {now.index.told:,} marks, {now.index.applied:,} members brought up to date, "
        f"{now.index.different} rows different from the table\n"
        f"{mended}"
    ).rstrip()


def _object(progress: "Progress") -> dict[str, Any]:
    now = progress.account
    return {
        "engine": progress.engine,
        "staged": now.staged,
        "rolled_back": progress.rolled_back,
        "sequenced": now.sequenced,
        "published": now.published,
        "resent": now.resent,
        "skipped": sum(consumer["skipped"] for consumer in now.consumers.values()),
        "consumers": {
            name: {
                "applied": c["applied"],
                "skipped": c["skipped"],
                "total": _money(c["total_cents"]),
            }
            for name, c in now.consumers.items()
        },
        "index": {
            "marked": now.index.told,
            "applied": now.index.applied,
            "total": _money(now.index.total_cents),
            "different": now.index.different,
            "equal": not now.index.different,
        },
        "newcomer": {
            "applied": now.newcomer.applied,
            "total": _money(now.newcomer.total_cents),
            "different": now.newcomer.different,
        },
        "drift": asdict(progress.drift) if progress.drift else None,
        "canonical_total": _money(now.canonical_cents),
        "equal": progress.equal,
        "lost": now.lost,
        "doubled": now.doubled,
        "out_of_order": now.out_of_order,
        "retried": progress.retried,
        "crashes": now.crashes,
        "kills": progress.kills,
        "seconds": round(progress.seconds, 1),
        "latency_ms": {"p50": round(now.p50_ms, 2), "p99": round(now.p99_ms, 2)},
    }


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"
