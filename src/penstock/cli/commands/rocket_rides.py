"""``penstock demo``: Rocket Rides, with crashes, repeated sends, a kill, and an audit."""

import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.cli.command import DIFFERENCES, Json, command, require_extra
from penstock.cli.connecting import Servers, servers
from penstock.cli.engines import choose_engine
from penstock.cli.loops import INTERRUPTED, Stop
from penstock.cli.render import say, show, show_json, show_text, table_text
from penstock.pipeline import Pipeline
from penstock.settings import Settings, duration

if TYPE_CHECKING:
    from penstock.demo.audit import Audit
    from penstock.demo.demonstration import DemoProgress

SAY_EVERY_S = 2.0


@command("engine")
def demo(
    settings: Settings,
    seconds: Annotated[
        float, typer.Option("--duration", metavar="DURATION", parser=duration())
    ] = 30,
    reconcile: Annotated[bool, typer.Option("--reconcile/--no-reconcile")] = True,
    console: Annotated[bool, typer.Option("--console")] = False,
    as_json: Json = False,
) -> None:
    """Run a sample pipeline under crashes, repeated sends and a kill. Exits with 4 if anything is
    lost or doubled.

    Args:
        seconds: Minimum time of traffic.
        reconcile: Also seed and repair wrong rows, and fill a new consumer from the tables.
        console: Also show the run in a browser, and print the link. At a terminal, the console
            stays open at the end.
    """
    with require_extra("demo", "the demo"):
        from penstock.demo.demonstration import Demo  # noqa: PLC0415  the same
        from penstock.demo.rides import pipeline  # noqa: PLC0415  an optional extra

    stop = Stop()
    with (
        servers(settings, schema=pipeline.scope.schema, is_requested=True) as urls,
        ExitStack() as stack,
    ):
        if console:
            show(f"The console: {stack.enter_context(_served_console(pipeline, urls))}")
        screen = _Screen(quiet=as_json)
        engine = choose_engine(settings, pipeline.consumers.values(), has_requests=True)
        say(
            f"Rocket Rides on the {engine} engine: {seconds:g} s of traffic, once it runs"
            + (", or more if the reconciliation takes longer." if reconcile else ".")
        )
        if engine == "stealing":
            say(
                "No streamer and no consumer runs: requests to the API do all the work. After the "
                "traffic, clients send health checks until everything is settled."
            )
        run = Demo(
            engine,
            seconds,
            urls.database_url,
            urls.redis_url,
            stop,
            screen.show,
            screen.wait,
            reconcile=reconcile,
        )
        try:
            progress = run.run()
        except KeyboardInterrupt:
            screen.close()
            say("stopped early, without the final comparison; all its processes have ended")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            screen.close()
        if as_json:
            show_json(_to_json(progress))
        else:
            show_text(_format_table(progress))
            show_text(_format_verdict(progress))
        if console and sys.stdin.isatty() and not stop():
            say("The console stays open until Enter is pressed.")
            sys.stdin.readline()
    if not progress.equal:
        raise typer.Exit(DIFFERENCES)


@contextmanager
def _served_console(pipeline: Pipeline, urls: Servers) -> Iterator[str]:
    """Serves the console while the demo runs; yields its link."""
    from penstock.console.access import Entrance  # noqa: PLC0415  an optional extra
    from penstock.console.serving import served  # noqa: PLC0415  the same
    from penstock.demo.rides import late_pipeline  # noqa: PLC0415  the same

    demo_pipeline = copy(pipeline)
    demo_pipeline._consumers = {**pipeline.consumers, **late_pipeline.consumers}  # noqa: SLF001  of another process, later
    from penstock.console.web_application import make_console  # noqa: PLC0415  the same

    entrance = Entrance(token=secrets.token_urlsafe(24))
    application = make_console(
        demo_pipeline,
        urls.database_url,
        urls.redis_url,
        access=entrance,
        acting_database_url=urls.database_url,
        hosts={"127.0.0.1", "localhost"},
    )
    with served(application) as port:
        yield f"http://127.0.0.1:{port}/enter?token={entrance.token}"


class _Screen:
    """A live table on a terminal, otherwise a line every ``SAY_EVERY_S`` seconds."""

    def __init__(self, *, quiet: bool) -> None:
        self._live: Live | None = None
        self._next = 0.0
        if sys.stderr.isatty() and not quiet:
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()

    def wait(self, text: str) -> None:
        self._show(text, text)

    def show(self, progress: "DemoProgress") -> None:
        self._show(_format_table(progress), _format_line(progress))

    def _show(self, table: str, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(table), refresh=True)
        elif monotonic() >= self._next:
            self._next = monotonic() + SAY_EVERY_S
            say(line)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _format_line(progress: "DemoProgress") -> str:
    now = progress.audit
    drift = f", drift repaired {progress.drift.repaired}" if progress.drift else ""
    applied = ", ".join(f"{name} {count}" for name, count, *_ in _make_rows(now))
    return (
        f"{progress.seconds:5.1f} s  {progress.phase}: staged {now.staged:,}, published "
        f"{now.published:,}, "
        f"applied {applied}; crashes {now.crashes}, kills {progress.kills}, resent "
        f"{now.resent}{drift}"
    )


def _format_table(progress: "DemoProgress") -> str:
    now = progress.audit
    rows = [
        *_make_rows(now),
        ("canonical", f"{now.staged:,}", "", "", _format_money(now.canonical_cents)),
    ]
    return _format_head(progress) + table_text(
        ["consumer", "#applied", "#skipped", "#lag", "#total"], rows
    )


def _make_rows(now: "Audit") -> list[tuple[str, ...]]:
    """Returns the records that each consumer applied, skipped and lacks, and its total."""
    receipts, copies = now.receipts, [("ride_index", now.index)]
    if now.late_consumer.position:
        copies.append(("ride-late", now.late_consumer))
    return [
        *(
            (
                name,
                f"{totals['applied']:,}",
                f"{totals['skipped']:,}",
                f"{now.staged - totals['position']:,}",
                _format_money(totals["total_cents"]),
            )
            for name, totals in now.consumers.items()
        ),
        *(
            (
                name,
                f"{copy.applied:,}",
                "",
                f"{copy.records - copy.position:,}",
                _format_money(copy.total_cents),
            )
            for name, copy in copies
        ),
        ("send_receipts", f"{receipts.sent:,}", "", f"{receipts.booked - receipts.sent:,}", ""),
    ]


def _format_head(progress: "DemoProgress") -> str:
    now = progress.audit
    return (
        f"{progress.phase}, {progress.seconds:.0f} s, {progress.engine}: staged {now.staged:,}, "
        f"sequenced {now.sequenced:,}, published {now.published:,}\n"
        f"rolled back {progress.rolled_back:,}, retried {progress.retried:,}, crashes "
        f"{now.crashes}, "
        f"kills {progress.kills}, batches sent again {now.resent}\n"
        f"stage to handler p50 {now.p50_ms:.1f} ms, p99 {now.p99_ms:.0f} ms\n\n"
    )


def _format_verdict(progress: "DemoProgress") -> str:
    now = progress.audit
    return (
        f"{'equal' if progress.equal else 'NOT EQUAL'}: {now.staged:,} records, "
        f"{len(now.consumers)} consumers, "
        f"lost {now.lost}, doubled {now.doubled}, out of order {now.out_of_order}\n"
        f"index: {now.index.records:,} marks, {now.index.applied:,} members brought up to date, "
        f"{now.index.different} rows different from the table\n"
        f"queue: {now.receipts.booked:,} receipts, {now.receipts.flooding:,} of them for one "
        "driver, "
        f"lost {now.receipts.lost}, doubled {now.receipts.doubled}\n"
        f"{_format_recruits(progress)}"
        f"{_format_drift(progress)}"
    ).rstrip()


def _format_recruits(progress: "DemoProgress") -> str:
    """Returns the share of the requests that was recruited; empty on the other engines."""
    recruits, requests = progress.recruits, max(1, progress.requests)
    if recruits is None:
        return ""
    return (
        f"recruits: {recruits['recruited']:,} of {progress.requests:,} requests "
        f"({recruits['recruited'] / requests:.1%}), "
        f"{recruits['finished']:,} did work ({recruits['finished'] / requests:.1%}), "
        f"{recruits['aborted']:,} gave up, "
        f"{recruits['failed']:,} failed; {progress.health_checks:,} of the requests were health "
        "checks after the traffic\n"
    )


def _format_drift(progress: "DemoProgress") -> str:
    """Returns the two lines about drift and the late consumer; empty without ``--reconcile``."""
    drift, late = progress.drift, progress.audit.late_consumer
    if drift is None:
        return ""
    return (
        f"drift: {drift.seeded} rows seeded, {drift.found} found, {drift.repaired} repaired"
        f"{', under traffic' if progress.under_traffic else ''}\n"
        f"late consumer: began with the tables, {late.different} rows different from them"
    )


def _to_json(progress: "DemoProgress") -> dict[str, Any]:
    """Returns all figures; amounts of money in cents."""
    figures = asdict(progress)
    sums = {name: getattr(progress.audit, name) for name in ("lost", "doubled", "out_of_order")}
    skipped = sum(consumer["skipped"] for consumer in progress.audit.consumers.values())
    return {**figures.pop("audit"), **figures, **sums, "skipped": skipped, "equal": progress.equal}


def _format_money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"
